//! `sapwood doctor`: checks the machine and says what to change.

use std::path::Path;

use clap::Args;
use serde::Serialize;

use super::{Common, TargetFlags};
use crate::config::keys;
use crate::config::layers::Flags;
use crate::config::ports::ConfiguredPort;
use crate::config::{BackendConfig, Config};
use crate::failure::{CliError, Exit};
use crate::hub::{ModelCache, ModelSource};
use crate::listening;
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
    let cache = ModelCache::new(&config.hub);
    let paths = config
        .models
        .iter()
        .filter_map(|model| model.path.as_deref());
    findings.extend(paths.map(|path| match ModelSource::read(path) {
        // One that is wrong is an error of the configuration.
        Ok(ModelSource::File(path)) => file(&path),
        Ok(named) => downloaded(&cache, &named, config.hub.offline),
        Err(why) => CheckResult::new("model file", Verdict::Fail, why, "correct its path"),
    }));
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

/// Whether llama.cpp has kernels for the processor; otherwise no model is loaded.
fn cpu() -> CheckResult {
    let cores = sapwood_engine::usable_processors();
    let found = format!("{} with {cores} cores", std::env::consts::ARCH);
    match kernels() {
        Ok(None) => CheckResult::new("cpu", Verdict::Ok, found, ""),
        Ok(Some((kernels, refused))) => {
            let verdict = match refused.is_empty() {
                true => Verdict::Ok,
                false => Verdict::Warn,
            };
            let refused = refused
                .iter()
                .map(|(name, why)| format!("; not used: {name}: {why}"));
            let found = format!("{found}; kernels: {kernels}{}", refused.collect::<String>());
            let hint = "copy the library again, from an archive of the same commit, or remove it; a back-end for a GPU needs its driver";
            CheckResult::new("cpu", verdict, found, hint)
        }
        Err((problem, remedy)) => {
            let found = format!("{found}; {problem}");
            CheckResult::new("cpu", Verdict::Fail, found, &remedy)
        }
    }
}

/// A description of the kernels of llama.cpp, and the names of libraries that are not used, with the reason.
type FoundKernels = (String, &'static [(String, String)]);

/// Describes the kernels of llama.cpp; an error has what is wrong, and what to do.
#[cfg(feature = "embedded")]
fn kernels() -> Result<Option<FoundKernels>, (String, String)> {
    match sapwood_engine::embedded::kernels() {
        Ok(kernels) => Ok(Some((kernels.to_string(), &kernels.refused))),
        Err(error) => Err((error.problem(), error.remedy())),
    }
}

/// Without llama.cpp there are none.
#[cfg(not(feature = "embedded"))]
fn kernels() -> Result<Option<FoundKernels>, (String, String)> {
    Ok(None)
}

fn memory() -> CheckResult {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit);
    let total = info.totalram.saturating_mul(unit) >> 20;
    let free = available().unwrap_or_else(|| info.freeram.saturating_mul(unit)) >> 20;
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
        "close other programs, raise the limit of the container, or use a smaller model or --cache-tokens",
    )
}

/// The memory that the engine considers available to a model, which the control groups of a container may limit.
#[cfg(feature = "embedded")]
fn available() -> Option<u64> {
    sapwood_engine::embedded::available_memory()
}

/// The memory that the kernel considers available without swapping; better than "free", which excludes caches.
#[cfg(not(feature = "embedded"))]
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kibibytes.checked_mul(1024)
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

/// Opens the port as the server would, and closes it at once.
fn port(port: &ConfiguredPort) -> CheckResult {
    let address = &port.address;
    if address == "systemd" {
        let found = "systemd passes the socket when it starts the server";
        return CheckResult::new("port", Verdict::Ok, found, "");
    }
    // On this thread alone, because this command must not fail on a machine that gives no more threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build();
    let opened = runtime
        .map_err(|error| CliError::new(format!("cannot listen on {address}: {error}")))
        .and_then(|runtime| runtime.block_on(listening::listen(port)));
    match opened {
        Ok(_) => CheckResult::new("port", Verdict::Ok, format!("{address} is free"), ""),
        Err(failure) => {
            // A warning only: the program that holds the port may be the server that the user means.
            let hint = "a server may be running there already";
            CheckResult::new("port", Verdict::Warn, failure.message, hint)
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

/// Whether a model that is named and not at a path is there.
fn downloaded(cache: &ModelCache, source: &ModelSource, offline: bool) -> CheckResult {
    if cache.has(source) {
        let found = format!("{source} is downloaded");
        return CheckResult::new("model file", Verdict::Ok, found, "");
    }
    let found = format!("{source} is not downloaded yet");
    if offline {
        let hint = "hub.offline keeps it from being downloaded: remove that, or copy the folder of hub.dir here";
        return CheckResult::new("model file", Verdict::Fail, found, hint);
    }
    let hint = "the first start downloads it; `sapwood models pull` does so now";
    CheckResult::new("model file", Verdict::Warn, found, hint)
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
    let address = host_and_port(url.expose());
    // Each of its addresses: `localhost` is two, and a server listens at one of them.
    let answer = std::net::ToSocketAddrs::to_socket_addrs(&address).and_then(|addresses| {
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

/// `HOST:PORT` of a URL; a URL without a port has that of its scheme.
fn host_and_port(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // The colons of an IPv6 address are in brackets.
    let behind = authority.rsplit(']').next().unwrap_or_default();
    if behind.contains(':') {
        return authority.to_owned();
    }
    // `evergreen+https` is `https`.
    let port = match scheme.rsplit('+').next() {
        Some("https" | "wss") => 443,
        _ => 80,
    };
    format!("{authority}:{port}")
}

const CONNECT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_a_port_is_looked_for_at_that_of_its_scheme() {
        for (url, address) in [
            ("https://models.example", "models.example:443"),
            ("https://models.example/v2?x=a:1", "models.example:443"),
            ("http://models.example/", "models.example:80"),
            ("evergreen+wss://models.example", "models.example:443"),
            ("ws://[::1]", "[::1]:80"),
            ("http://[::1]:8000", "[::1]:8000"),
            (
                "https://models.example:8000?dialect=json",
                "models.example:8000",
            ),
        ] {
            assert_eq!(host_and_port(url), address, "{url}");
        }
    }
}
