//! `sapwood doctor`: checks the machine and says what to change.

use std::net::TcpListener;
use std::path::Path;

use clap::Args;
use serde::Serialize;

use super::{Common, TargetFlags};
use crate::config::keys;
use crate::config::layers::Flags;
use crate::config::ports::ConfiguredPort;
use crate::config::{BackendConfig, Config};
use crate::failure::{CliError, Exit};
use crate::output::{self, TextStyle, paint};
use sapwood_proto::secret::SecretUrl;
use sapwood_server::listener::descriptors::{DescriptorCheck, RESERVE};

#[derive(Debug, Args)]
pub(super) struct DoctorCommand {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The address to check
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    #[command(flatten)]
    target: TargetFlags,
}

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

/// One check: its subject, the finding and a remedy.
#[derive(Debug, Serialize)]
struct CheckResult {
    check: &'static str,
    verdict: Verdict,
    found: String,
    hint: Option<String>,
}

impl CheckResult {
    fn new(check: &'static str, verdict: Verdict, found: impl Into<String>, hint: &str) -> Self {
        let hint = (verdict != Verdict::Ok).then(|| hint.to_owned());
        Self {
            check,
            verdict,
            found: found.into(),
            hint,
        }
    }
}

impl DoctorCommand {
    pub(super) fn run(&self, common: &Common) -> Result<Exit, CliError> {
        let mut flags = Flags::default();
        flags.set("listen", "--listen", self.listen.clone());
        self.target.set(&mut flags)?;
        let findings = match common.config(flags) {
            Ok(config) => examine(&config),
            Err(failure) => {
                let hint = "correct it and run doctor again: nothing else can be checked";
                vec![CheckResult::new(
                    "configuration",
                    Verdict::Fail,
                    failure.message,
                    hint,
                )]
            }
        };
        if self.json {
            output::json(&findings)?;
        } else {
            output::data(findings.iter().map(line).collect::<String>())?;
        }
        let failed = findings
            .iter()
            .any(|finding| finding.verdict == Verdict::Fail);
        Ok(if failed { Exit::Failure } else { Exit::Ok })
    }
}

fn line(finding: &CheckResult) -> String {
    let mark = match finding.verdict {
        Verdict::Ok => paint(TextStyle::Green, "ok  "),
        Verdict::Warn => paint(TextStyle::Yellow, "warn"),
        Verdict::Fail => paint(TextStyle::Red, "FAIL"),
    };
    let hint = finding
        .hint
        .as_ref()
        .map(|hint| format!("\n       → {hint}"));
    format!(
        "{mark}  {}: {}{}\n",
        finding.check,
        finding.found,
        hint.unwrap_or_default()
    )
}

fn examine(config: &Config) -> Vec<CheckResult> {
    let mut findings = vec![configuration(config), cpu(), memory(), descriptors(config)];
    findings.push(port(&config.common_port()));
    findings.extend(config.own_ports().iter().map(port));
    findings.extend(
        config
            .models
            .iter()
            .filter_map(|model| Some(file(model.path.as_deref()?))),
    );
    findings.push(models(config));
    findings.extend(
        config
            .client
            .server
            .as_ref()
            // `here` is no address.
            .filter(|url| url.expose() != "here")
            .map(server),
    );
    findings
}

fn configuration(config: &Config) -> CheckResult {
    match keys::load(&config.auth) {
        Ok(keys) => {
            let found = format!("sound; {} API keys", keys.len());
            CheckResult::new("configuration", Verdict::Ok, found, "")
        }
        Err(failure) => CheckResult::new(
            "configuration",
            Verdict::Fail,
            failure.message,
            "correct the key file",
        ),
    }
}

/// llama.cpp is built for AVX2 on this architecture; without it the process would die of an illegal instruction.
fn cpu() -> CheckResult {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let found = format!("{} with {cores} cores", std::env::consts::ARCH);
    // Asked of the CPU and not of the build: this is the check for a binary that was built elsewhere.
    let missing = missing_cpu_features();
    if missing.is_empty() {
        return CheckResult::new("cpu", Verdict::Ok, found, "");
    }
    let hint = "build on this machine with GGML_NATIVE=ON, or use another machine";
    CheckResult::new(
        "cpu",
        Verdict::Fail,
        format!("{found}; lacks {}", missing.join(", ")),
        hint,
    )
}

#[cfg(target_arch = "x86_64")]
fn missing_cpu_features() -> Vec<&'static str> {
    let known = [
        ("avx", std::arch::is_x86_feature_detected!("avx")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
    ];
    known
        .into_iter()
        .filter(|(_, there)| !there)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn missing_cpu_features() -> Vec<&'static str> {
    Vec::new()
}

fn memory() -> CheckResult {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit);
    let total = info.totalram.saturating_mul(unit) >> 20;
    let free = free_mebibytes().unwrap_or_else(|| info.freeram.saturating_mul(unit) >> 20);
    let verdict = if free < 512 {
        Verdict::Warn
    } else {
        Verdict::Ok
    };
    let found = format!("{free} MiB available of {total} MiB");
    CheckResult::new(
        "memory",
        verdict,
        found,
        "close other programs, or use a smaller model or --ctx",
    )
}

/// The memory that the kernel considers available without swapping; better than "free", which excludes caches.
fn free_mebibytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? >> 10)
}

fn descriptors(config: &Config) -> CheckResult {
    let DescriptorCheck { soft, hard } = DescriptorCheck::read();
    let needed = config.limits.connections as u64 + RESERVE;
    // The hard limit counts: a server raises its soft one itself.
    let enough = hard.is_none_or(|hard| hard >= needed);
    let show =
        |limit: Option<u64>| limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string());
    let found = format!(
        "{} (can be raised to {}), {needed} wanted",
        show(soft),
        show(hard)
    );
    let verdict = if enough { Verdict::Ok } else { Verdict::Warn };
    let hint = "raise the hard limit (ulimit -Hn, LimitNOFILE=) or lower limits.connections";
    CheckResult::new("file descriptors", verdict, found, hint)
}

fn port(ConfiguredPort { address, flag, .. }: &ConfiguredPort) -> CheckResult {
    // Bound and released at once, without accepting anything.
    match TcpListener::bind(address.as_str()) {
        Ok(_) => CheckResult::new("port", Verdict::Ok, format!("{address} is free"), ""),
        Err(error) => {
            // A warning only: the program that holds the port may be the server that the user means.
            let hint = format!(
                "a server may be running there already; otherwise choose another with {flag}"
            );
            CheckResult::new("port", Verdict::Warn, format!("{address}: {error}"), &hint)
        }
    }
}

fn file(path: &Path) -> CheckResult {
    let shown = path.display();
    match crate::models::is_gguf(path) {
        Ok(()) => {
            let found = format!("{shown} is a GGUF file");
            CheckResult::new("model file", Verdict::Ok, found, "")
        }
        Err(why) => {
            let hint = "check the path and its permissions; a model in another format has to be converted to GGUF";
            CheckResult::new("model file", Verdict::Fail, format!("{shown}: {why}"), hint)
        }
    }
}

fn models(config: &Config) -> CheckResult {
    let embedded = cfg!(feature = "embedded");
    let wanted = config
        .models
        .iter()
        .any(|model| model.backend == BackendConfig::Embedded);
    if wanted && !embedded {
        let hint = "build with `cargo xtask serve`, or with --features cli,embedded";
        let found = "this binary was built without the embedded engine";
        return CheckResult::new("models", Verdict::Fail, found, hint);
    }
    let names: Vec<_> = config
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    if names.is_empty() && !cfg!(feature = "demo-model") {
        let hint = "name one with --model PATH.gguf, or build with the feature demo-model";
        return CheckResult::new("models", Verdict::Warn, "none configured", hint);
    }
    let found = if names.is_empty() {
        "the demo model".into()
    } else {
        names.join(", ")
    };
    CheckResult::new("models", Verdict::Ok, found, "")
}

/// Checks only whether something listens there: `sapwood models --server URL` shows what it is.
fn server(url: &SecretUrl) -> CheckResult {
    let whole = url.expose();
    let rest = whole.split_once("://").map_or(whole, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // Each of its addresses: `localhost` is two, and a server listens at one of them.
    let answer = std::net::ToSocketAddrs::to_socket_addrs(authority).and_then(|addresses| {
        let mut answer = Err(std::io::ErrorKind::AddrNotAvailable.into());
        for address in addresses {
            answer = std::net::TcpStream::connect_timeout(&address, CONNECT_TIMEOUT);
            if answer.is_ok() {
                break;
            }
        }
        answer
    });
    match answer {
        Ok(_) => CheckResult::new("server", Verdict::Ok, format!("{url} answers"), ""),
        Err(error) => {
            let hint = "start it with `sapwood serve`, or correct --server";
            CheckResult::new("server", Verdict::Fail, format!("{url}: {error}"), hint)
        }
    }
}

const CONNECT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(3);
