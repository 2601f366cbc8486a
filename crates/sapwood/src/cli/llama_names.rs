//! Names of `llama-server`'s flags: short ones that stand for ours, and those of which a command line that is moved here needs to know
//! what takes their place.

use std::ffi::{OsStr, OsString};

use crate::failure::CliError;

/// Short names with several letters, which are several flags to a parser that knows only single ones.
const SHORT: [(&str, &str); 14] = [
    ("-md", "--draft-model"),
    ("-ngld", "--draft-gpu-layers"),
    ("-cd", "--draft-ctx"),
    ("-ngl", "--gpu-layers"),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-mg", "--main-gpu"),
    ("-ot", "--override-tensor"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-fa", "--flash-attn"),
    ("-ub", "--ubatch-size"),
    ("-tb", "--threads-batch"),
    ("-np", "--parallel"),
];

const REPOSITORY: &str = "use --model hf:OWNER/REPO[:QUANT]";
const REPOSITORY_FILE: &str = "use --model hf:OWNER/REPO:FILE.gguf";
const TOKEN: &str = "set HF_TOKEN, or hub.token in sapwood.toml";
const ADDRESS: &str = "use --listen HOST:PORT";
const EXPERTS: &str = "use -ot, for example -ot exps=CPU";
const RAM: &str = "use --prefix-ram-bytes BYTES";
const ALWAYS: &str = "leave it out: it is always so";
const DRAFT: &str = "use --draft-model hf:OWNER/REPO[:QUANT]";
const TEMPLATE: &str = "the chat template is that of the file";
const LOG: &str = "use --log debug";
const CELLS: &str = "use --cache-tokens TOKENS: less than --ctx times --parallel is unified";
const DEVICES: &str =
    "choose GPUs by CUDA_VISIBLE_DEVICES and the like, or use -ngl 0 in place of none";
const NEVER: &str = "leave it out: it cannot be switched off";
const TIMES: &str = "use limits.request and limits.queue_timeout in sapwood.toml";
const NO_PAGES: &str = "leave it out: there is no web interface";

/// Flags that are not here, and what to do instead. The parser would take a short one for others: `-hf` for the help, `-cb` for a
/// context of `b` tokens.
const REPLACED: [(&str, &str); 45] = [
    ("-hf", REPOSITORY),
    ("-hfr", REPOSITORY),
    ("--hf-repo", REPOSITORY),
    ("-hff", REPOSITORY_FILE),
    ("--hf-file", REPOSITORY_FILE),
    ("-hft", TOKEN),
    ("--hf-token", TOKEN),
    ("-hfd", DRAFT),
    ("-hfrd", DRAFT),
    ("--hf-repo-draft", DRAFT),
    ("-mu", "use --model URL"),
    ("--model-url", "use --model URL"),
    ("-mm", "there are no models of images here"),
    ("--mmproj", "there are no models of images here"),
    ("-a", "use --model NAME=PATH"),
    ("--alias", "use --model NAME=PATH"),
    (
        "--models-dir",
        "name each model: --model NAME=PATH, which may be repeated",
    ),
    ("--host", ADDRESS),
    ("--port", ADDRESS),
    (
        "--api-key-file",
        "use --key-file FILE, whose keys `sapwood key new` makes",
    ),
    ("-to", TIMES),
    ("--timeout", TIMES),
    (
        "--sleep-idle-seconds",
        "use --idle-unload, for example --idle-unload 300s",
    ),
    ("-cmoe", EXPERTS),
    ("--cpu-moe", EXPERTS),
    ("-ncmoe", EXPERTS),
    ("--n-cpu-moe", EXPERTS),
    ("-cram", RAM),
    ("--cache-ram", RAM),
    ("-cb", ALWAYS),
    ("--jinja", ALWAYS),
    ("--no-jinja", TEMPLATE),
    ("--chat-template", TEMPLATE),
    ("--chat-template-file", TEMPLATE),
    ("-v", LOG),
    ("--verbose", LOG),
    ("-kvu", CELLS),
    ("--kv-unified", CELLS),
    ("-dev", DEVICES),
    ("--device", DEVICES),
    ("-nocb", NEVER),
    ("--no-cont-batching", NEVER),
    ("--no-warmup", NEVER),
    ("--metrics", ALWAYS),
    ("--no-webui", NO_PAGES),
];

/// Replaces the short names by the long ones, up to `--`.
pub(super) fn expand(arguments: &mut [OsString]) {
    let options = arguments.iter_mut().take_while(|it| *it != "--");
    for argument in options {
        if let Some((_, long)) = SHORT.iter().find(|(short, _)| argument == short) {
            *argument = (*long).into();
        }
    }
}

/// Refuses the first flag of `serve` that is not here, and says what to do instead.
///
/// # Errors
/// [`CliError::usage`], with that.
pub(super) fn check(arguments: &[OsString]) -> Result<(), CliError> {
    if arguments.get(1).is_none_or(|command| command != "serve") {
        return Ok(());
    }
    let options = arguments.iter().skip(2).take_while(|it| *it != "--");
    match options.filter_map(|argument| replaced(argument)).next() {
        None => Ok(()),
        Some((flag, instead)) => Err(CliError::usage(format!(
            "{flag} is a flag of llama-server: {instead}. docs/moving-from-llama-server.md has all of them"
        ))),
    }
}

/// The row of a flag, also of `--flag=VALUE`.
fn replaced(argument: &OsStr) -> Option<(&'static str, &'static str)> {
    let argument = argument.to_str()?;
    let flag = argument.split_once('=').map_or(argument, |(flag, _)| flag);
    REPLACED.into_iter().find(|(name, _)| *name == flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_of_theirs_says_what_to_use() {
        let refused = |given: &[&str]| {
            let given: Vec<OsString> = given.iter().map(OsString::from).collect();
            check(&given).err().map(|error| error.to_string())
        };
        let expect = |given: &[&str], instead: &str| {
            let error = refused(given).unwrap_or_default();
            assert!(error.contains(instead), "{given:?}: {error}");
        };
        expect(&["sapwood", "serve", "-hf", "a/b"], "--model hf:OWNER/REPO");
        expect(&["sapwood", "serve", "--port=80"], "--listen");
        expect(&["sapwood", "serve", "-m", "a.gguf", "-cb"], "always");
        // To the parser these are `-h`, `-n` with the value `ocb`, and `-k`.
        expect(&["sapwood", "serve", "-hfrd", "a/b"], "--draft-model");
        expect(&["sapwood", "serve", "-nocb"], "cannot be switched off");
        expect(&["sapwood", "serve", "-kvu"], "--cache-tokens");
        expect(&["sapwood", "serve", "--chat-template=x"], "of the file");
        for given in [
            &["sapwood", "serve", "-m", "a.gguf", "--listen", "0.0.0.0:80"][..],
            &["sapwood", "run", "f", "--", "-hf"],
            &["sapwood", "serve", "--", "-hf"],
            &["sapwood"],
        ] {
            assert_eq!(refused(given), None);
        }
    }

    /// Otherwise a flag of ours could never be given.
    #[test]
    fn no_flag_of_serve_is_refused() {
        let command = <crate::cli::Cli as clap::CommandFactory>::command();
        let serve = command.find_subcommand("serve").unwrap();
        for argument in serve.get_arguments() {
            let longs = argument.get_long_and_visible_aliases().unwrap_or_default();
            let longs = longs.into_iter().map(|long| format!("--{long}"));
            let shorts = argument.get_short_and_visible_aliases().unwrap_or_default();
            let shorts = shorts.into_iter().map(|short| format!("-{short}"));
            for name in longs.chain(shorts) {
                assert_eq!(replaced(name.as_ref()), None, "{name}");
            }
        }
    }
}
