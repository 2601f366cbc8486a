//! Sampling parameters as flags, by the names of `llama-server`'s: defaults of the models of `serve`, and parameters of the
//! requests of `chat` and `run`.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use sapwood_kernel::SamplingDefaults;
use sapwood_proto::params::{Domain, GenerationParams, JsonCoercion, ParamSpec};
use serde_json::{Map, Value};

use crate::config::layers::Flags;

/// The flags that were given, each with its value as JSON; null for a value that stands for "not set".
#[derive(Clone, Debug, Default)]
pub(super) struct SamplingFlags(Vec<(&'static SamplingFlag, Value)>);

impl SamplingFlags {
    /// The defaults of the models of this process.
    pub(super) fn set(&self, flags: &mut Flags) {
        for (flag, value) in &self.0 {
            // JSON has no value that the configuration lacks.
            let value = figment::value::Value::serialize(value).ok();
            flags.set(flag.key, flag.long, value);
        }
    }

    /// The parameters of a request.
    pub(super) fn params(&self) -> Map<String, Value> {
        let given = self.0.iter().filter(|(_, value)| !value.is_null());
        let given = given.map(|(flag, value)| (flag.param().to_owned(), value.clone()));
        given.collect()
    }

    /// The first of these flags that was given.
    pub(super) fn named(&self) -> Option<&'static str> {
        self.0.first().map(|(flag, _)| flag.long)
    }
}

impl FromArgMatches for SamplingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = FLAGS.iter().filter_map(|flag| {
            let values = matches.get_many::<Value>(flag.param())?;
            Some((flag, flag.joined(values)))
        });
        Ok(Self(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for SamplingFlags {
    fn augment_args(command: Command) -> Command {
        command.args(FLAGS.iter().map(SamplingFlag::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// One flag. Its range is that of its parameter.
#[derive(Debug)]
struct SamplingFlag {
    /// The key that it sets, which ends with the name of the parameter.
    key: &'static str,
    long: &'static str,
    aliases: &'static [&'static str],
    short: Option<char>,
    value: &'static str,
    help: &'static str,
}

/// What the keys begin with.
const TABLE: &str = "engine.sampling.";

impl SamplingFlag {
    fn param(&self) -> &'static str {
        self.key.strip_prefix(TABLE).unwrap_or(self.key)
    }

    fn arg(&'static self) -> Arg {
        let action = if self.is_list() {
            ArgAction::Append
        } else {
            ArgAction::Set
        };
        let arg = Arg::new(self.param())
            .long(self.long.trim_start_matches('-'))
            .visible_aliases(self.aliases)
            .value_name(self.value)
            .help(self.help)
            .help_heading("Sampling")
            .action(action)
            .allow_negative_numbers(true)
            .value_parser(move |text: &str| self.read(text));
        match self.short {
            Some(short) => arg.short(short),
            None => arg,
        }
    }

    fn domain(&self) -> Option<(&'static ParamSpec, Domain)> {
        let spec = ParamSpec::named(self.param())?;
        Some((spec, spec.domain(&SamplingDefaults::RANGES)))
    }

    /// Whether it may be repeated, each time with one text.
    fn is_list(&self) -> bool {
        matches!(self.domain(), Some((_, Domain::Texts { .. })))
    }

    /// Reads one value.
    ///
    /// # Errors
    /// What it must be.
    fn read(&self, text: &str) -> Result<Value, String> {
        let (spec, domain) = self.domain().ok_or("there is no such parameter")?;
        let is_text = self.is_list();
        let is_unlimited = text == "-1" && matches!(self.param(), "seed" | "max_tokens");
        if is_unlimited || (is_text && text == NONE) {
            return Ok(Value::Null);
        }
        // A text is one text, whatever it looks like; everything else is written as text here.
        let (given, coercion) = if is_text {
            (unescaped(text), JsonCoercion::Strict)
        } else {
            (text.to_owned(), JsonCoercion::FromText)
        };
        let mut params = GenerationParams::default();
        let ranges = &SamplingDefaults::RANGES;
        let read = params.set_json(spec, &Value::from(given), ranges, coercion);
        let wrong = || match domain {
            Domain::Texts { bytes, .. } => format!("must be a text of 1 to {bytes} bytes"),
            _ => format!("must be {domain}"),
        };
        read.map_err(|_| wrong())?;
        let read = params.to_json().unwrap_or_default().remove(spec.name);
        read.ok_or_else(wrong)
    }

    /// The values of a repeated flag as one list; `none` among them begins it anew.
    fn joined<'a>(&self, values: impl Iterator<Item = &'a Value>) -> Value {
        if !self.is_list() {
            return values.last().cloned().unwrap_or_default();
        }
        let mut all = Vec::new();
        for value in values {
            match value {
                Value::Array(texts) => all.extend(texts.iter().cloned()),
                _ => all.clear(),
            }
        }
        Value::Array(all)
    }
}

/// The text that stands for an empty list.
const NONE: &str = "none";

/// A text as `llama-server` reads it by default: shells make it hard to pass a line break.
fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(letter) = rest.next() {
        let next = (letter == '\\').then(|| rest.clone().next()).flatten();
        let meant = match next {
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some(quoted @ ('\\' | '\'' | '"')) => quoted,
            _ => {
                out.push(letter);
                continue;
            }
        };
        rest.next();
        out.push(meant);
    }
    out
}

macro_rules! flags {
    ($($param:literal $long:literal $([$($alias:literal)*])? $($short:literal)? $value:ident $help:literal;)*) => {
        &[$(SamplingFlag {
            key: concat!("engine.sampling.", $param),
            long: $long,
            aliases: &[$($($alias),*)?],
            short: flags!(@short $($short)?),
            value: stringify!($value),
            help: $help,
        }),*]
    };
    (@short $short:literal) => { Some($short) };
    (@short) => { None };
}

/// A flag for each parameter that may have a default.
const FLAGS: &[SamplingFlag] = flags! {
    "temperature" "--temperature" ["temp"] N "0 always takes the likeliest token; higher varies more";
    "top_k" "--top-k" N "Keep this many of the likeliest tokens; 0 is off";
    "top_p" "--top-p" P "Keep the smallest set of the likeliest tokens with this probability; 1 is off";
    "min_p" "--min-p" P "Keep tokens with at least this fraction of the highest probability; 0 is off";
    "typical_p" "--typical" ["typical-p"] P "Keep the most typical tokens with this probability; 1 is off";
    "top_n_sigma" "--top-nsigma" ["top-n-sigma"] N "Keep tokens at most so many standard deviations below the best; 0 is off";
    "repetition_penalty" "--repeat-penalty" ["repetition-penalty"] N "Divide the logits of tokens that occurred; 1 is off";
    "presence_penalty" "--presence-penalty" N "Subtract this from the logits of tokens of the output; 0 is off";
    "frequency_penalty" "--frequency-penalty" N "Subtract this for each time that a token occurs in the output; 0 is off";
    "penalty_last_n" "--repeat-last-n" ["penalty-last-n"] TOKENS "These penalties look at so many of the last tokens; -1: all, 0: none";
    "dry_multiplier" "--dry-multiplier" N "DRY: lower the logits of tokens that would continue a repetition; 0 is off";
    "dry_base" "--dry-base" N "DRY: the factor for each further token of the repetition";
    "dry_allowed_length" "--dry-allowed-length" TOKENS "DRY: shorter repetitions are allowed";
    "dry_penalty_last_n" "--dry-penalty-last-n" TOKENS "DRY: look at so many of the last tokens; -1: all, 0: off";
    "dry_sequence_breakers" "--dry-sequence-breaker" TEXT "DRY: no repetition crosses this text, or `none`; may be repeated";
    "xtc_probability" "--xtc-probability" P "XTC: the probability of dropping the likeliest tokens; 0 is off";
    "xtc_threshold" "--xtc-threshold" P "XTC: drop tokens of at least this probability but the last; above 0.5 is off";
    "mirostat" "--mirostat" N "2: mirostat 2 in place of the steps that drop tokens; 0 is off";
    "mirostat_tau" "--mirostat-ent" ["mirostat-tau"] BITS "Mirostat: the surprise that it aims at";
    "mirostat_eta" "--mirostat-lr" ["mirostat-eta"] N "Mirostat: how fast it corrects itself";
    "dynatemp_range" "--dynatemp-range" N "How far the temperature follows the entropy, up and down; 0 is off";
    "dynatemp_exponent" "--dynatemp-exp" ["dynatemp-exponent"] N "The exponent of the entropy in the dynamic temperature";
    "samplers" "--samplers" NAMES "The steps in their order, with ; between them; those that are left out are off";
    "seed" "--seed" 's' N "The same seed and request give the same tokens; -1: another one for each request";
    "max_tokens" "--max-tokens" ["predict" "n-predict"] 'n' N "Maximum number of tokens of an answer; -1: none";
    "stop" "--stop" ["reverse-prompt"] TEXT "A text that ends an answer; may be repeated";
};

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::config::layers::Layers;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        sampling: SamplingFlags,
    }

    fn parse(given: &[&str]) -> Result<SamplingFlags, clap::Error> {
        let all = ["sapwood"].iter().chain(given);
        Only::try_parse_from(all).map(|only| only.sampling)
    }

    /// What was given, and the parameters.
    #[test]
    fn the_flags_of_llama_server_set_parameters() {
        for (given, expected) in [
            (&[][..], json!({})),
            (
                &[
                    "--temp",
                    "0.6",
                    "--top-k",
                    "20",
                    "--top-p",
                    "0.95",
                    "--min-p",
                    "0.05",
                    "--typical",
                    "0.9",
                ],
                json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9}),
            ),
            (
                &[
                    "--repeat-penalty",
                    "1.1",
                    "--repeat-last-n",
                    "-1",
                    "--presence-penalty",
                    "-0.5",
                    "--frequency-penalty=1",
                ],
                json!({"repetition_penalty": 1.1, "penalty_last_n": -1, "presence_penalty": -0.5, "frequency_penalty": 1.0}),
            ),
            (
                &[
                    "--samplers",
                    "penalties;dry;top_k;temperature",
                    "--top-nsigma",
                    "-1",
                ],
                json!({"samplers": ["penalties", "dry", "top_k", "temperature"], "top_n_sigma": -1.0}),
            ),
            (
                &[
                    "--dry-sequence-breaker",
                    "x",
                    "--dry-sequence-breaker",
                    "none",
                    "--dry-sequence-breaker",
                    r"\n",
                ],
                json!({"dry_sequence_breakers": ["\n"]}),
            ),
            (
                &["--dry-sequence-breaker", "none"],
                json!({"dry_sequence_breakers": []}),
            ),
            (
                &["--stop", "[a", "--reverse-prompt", r"\\n\q"],
                json!({"stop": ["[a", r"\n\q"]}),
            ),
            (&["-s", "-1", "-n", "-1"], json!({})),
            (
                &["-s", "7", "--predict", "9"],
                json!({"seed": 7, "max_tokens": 9}),
            ),
        ] {
            let expected = expected.as_object().unwrap();
            assert_eq!(&parse(given).unwrap().params(), expected, "{given:?}");
        }
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_its_range() {
        for (given, must) in [
            (["--temp", "-1"], "0"),
            (["--temp", "hot"], "100"),
            (["--top-p", "0"], "(0, 1]"),
            (["--mirostat", "1"], "2"),
            (["--samplers", "top_q"], "top_k"),
            (["--samplers", ""], "top_k"),
            (["-n", "0"], "1"),
            (["--stop", ""], "text"),
        ] {
            let error = parse(&given).unwrap_err().to_string();
            assert!(error.contains("must be") && error.contains(must), "{error}");
        }
    }

    #[test]
    fn there_is_a_flag_for_each_parameter_that_may_have_a_default() {
        let mut params: Vec<_> = FLAGS.iter().map(SamplingFlag::param).collect();
        let mut names = SamplingDefaults::NAMES;
        params.sort_unstable();
        names.sort_unstable();
        assert_eq!(params, names);
    }

    #[test]
    fn serve_has_them_as_defaults_of_its_models() {
        let given = [
            "--temp",
            "0.6",
            "--samplers",
            "top_k;temperature",
            "--stop",
            "END",
            "-s",
            "-1",
        ];
        let mut flags = Flags::default();
        parse(&given).unwrap().set(&mut flags);
        let layers = Layers::read(None, flags).unwrap();
        let defaults = layers.config().unwrap().engine.sampling.alone();
        let expected =
            json!({"temperature": 0.6, "samplers": ["top_k", "temperature"], "stop": ["END"]});
        assert_eq!(Value::from(defaults.params().to_json().unwrap()), expected);
        let origin = layers.origin("engine.sampling.temperature");
        assert_eq!(origin.to_string(), "flag --temperature");
    }
}
