//! `cargo xtask ci`: every check and every test, in lanes.
//!
//! Missing tools are installed before the first lane. A lane whose tool cannot be installed is skipped, and a skipped
//! lane fails the run unless it is allowed by name. A failed lane does not stop the others. The content of each lane is
//! in `ci::lanes`.

mod busy;
mod lanes;
mod port;
mod summary;

use std::time::Instant;

use anyhow::{Result, bail};

use crate::process;
use crate::tools::Tool;
use lanes::{LANES, LONG};
pub(crate) use lanes::{TESTED, build_server};
use summary::{Report, Summary};

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only this lane; may be repeated
    #[arg(long = "lane", value_name = "NAME")]
    lanes: Vec<String>,
    /// List the lanes and stop
    #[arg(long)]
    list: bool,
    /// Lanes that may be skipped if their tools cannot be installed; without a name, all of them
    #[arg(
        long,
        value_name = "NAME,...",
        num_args = 0..=1,
        value_delimiter = ',',
        default_missing_value = "all"
    )]
    allow_skips: Vec<String>,
    /// Stop at the first lane that fails
    #[arg(long)]
    fail_fast: bool,
    #[command(flatten)]
    settings: Settings,
}

/// The options that lanes get.
#[derive(clap::Args)]
pub(crate) struct Settings {
    /// Run the tests beside two busy loops
    #[arg(long)]
    pub(crate) busy: bool,
    /// Seconds for each fuzz target
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub(crate) seconds: u32,
    /// Seed of the fuzzers, to repeat a run; default: a new one, which is printed
    #[arg(long)]
    pub(crate) seed: Option<u32>,
}

/// The result of a lane that did not fail.
pub(crate) enum Outcome {
    /// It ran and found no error.
    Passed,
    /// It could not run, for this reason.
    Skipped(String),
}

/// A check, or several related checks.
struct Lane {
    name: &'static str,
    about: &'static str,
    tools: &'static [Tool],
    run: fn(&Settings) -> Result<Outcome>,
}

/// Runs the lanes and prints the result of each.
///
/// # Errors
/// If a lane fails, if a lane is skipped that must not be, or if there is no lane of a given name.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.list {
        for lane in LANES.iter().chain(LONG) {
            process::print_line(&format!("{:11} {}", lane.name, lane.about));
        }
        return Ok(());
    }
    for name in options.lanes.iter().chain(&options.allow_skips) {
        let known = LANES.iter().chain(LONG).any(|lane| lane.name == name);
        if !known && name != ALL {
            bail!("there is no lane `{name}`; `cargo xtask ci --list` shows them");
        }
    }
    let named = |lane: &&Lane| options.lanes.iter().any(|name| name == lane.name);
    let usual = LANES
        .iter()
        .filter(|lane| options.lanes.is_empty() || named(lane));
    let chosen: Vec<_> = usual.chain(LONG.iter().filter(named)).collect();
    let mut summary = Summary::default();
    let lacking = install_tools(&chosen);
    for lane in chosen {
        let start = Instant::now();
        let missing = lane.tools.iter().find_map(|tool| {
            let (name, error) = lacking.iter().find(|(name, _)| *name == tool.name)?;
            Some(format!("{name} is missing: {error}"))
        });
        let result = match missing {
            Some(why) => Ok(Outcome::Skipped(why)),
            None => {
                process::heading(&format!("{}: {}", lane.name, lane.about));
                (lane.run)(&options.settings)
            }
        };
        let failed = result.is_err();
        let took = start.elapsed();
        process::print_line(&format!("{} took {} s", lane.name, took.as_secs()));
        summary.add(Report {
            lane: lane.name,
            took,
            result,
        });
        if failed && options.fail_fast {
            break;
        }
    }
    summary.conclude(|lane| {
        let allowed = |name: &String| name == lane || name == ALL;
        options.allow_skips.iter().any(allowed)
    })
}

/// The name in `--allow-skips` for every lane.
const ALL: &str = "all";

/// Installs the tools of these lanes. Returns those that cannot be installed, with the reason.
fn install_tools(lanes: &[&Lane]) -> Vec<(&'static str, String)> {
    let mut tools: Vec<&Tool> = Vec::new();
    for tool in lanes.iter().flat_map(|lane| lane.tools) {
        if tools.iter().all(|known| known.name != tool.name) {
            tools.push(tool);
        }
    }
    let mut lacking = Vec::new();
    for tool in tools {
        if let Err(error) = tool.ensure() {
            process::print_line(&format!("{} is missing: {error:#}", tool.name));
            lacking.push((tool.name, format!("{error:#}")));
        }
    }
    lacking
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Options;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn skips_are_allowed_by_name() {
        let allowed = |words: &[&str]| {
            let line = Line::try_parse_from([&["ci"], words].concat()).unwrap();
            line.options.allow_skips
        };
        assert!(allowed(&[]).is_empty());
        assert_eq!(allowed(&["--allow-skips", "wasm"]), ["wasm"]);
        assert_eq!(allowed(&["--allow-skips", "wasm,fuzz"]), ["wasm", "fuzz"]);
        assert_eq!(allowed(&["--allow-skips"]), ["all"]);
        assert_eq!(allowed(&["--allow-skips", "--lane", "fmt"]), ["all"]);
    }
}
