//! The two ways of keeping controllers apart (AI-701), as `sapwood controller test` tries both.

use clap::ValueEnum;
use sapwood_control::host::Host;

use crate::config::controllers::ControllersConfig;
use crate::controllers::host_config;
use crate::failure::CliError;

/// How controllers are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Isolation {
    /// A process for each sequence, as in a runtime of another engine.
    Sequence,
    /// Threads of this process, as in a server.
    Shared,
}

impl Isolation {
    /// The modes that are tried: the one that was asked for, or all that this system has (AI-1017).
    pub(super) fn tested(asked: Option<Self>) -> Vec<Self> {
        match asked {
            Some(asked) => vec![asked],
            None if cfg!(target_os = "linux") => vec![Self::Shared, Self::Sequence],
            None => vec![Self::Shared],
        }
    }

    /// Its name, as in the flag.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sequence => "sequence",
            Self::Shared => "shared",
        }
    }
}

/// What controllers are tested in.
pub(super) struct TestHost {
    host: Host,
    /// Read by the template again whenever it is started.
    #[cfg(target_os = "linux")]
    _vocabulary: Option<std::fs::File>,
}

impl TestHost {
    /// # Errors
    /// This system has no such mode, or the Wasm engine does not run on it.
    pub(super) fn start(
        isolation: Isolation,
        config: &ControllersConfig,
    ) -> Result<Self, CliError> {
        match isolation {
            Isolation::Shared => {
                let host = Host::new(host_config(config));
                Ok(Self {
                    host: host.map_err(|why| CliError::new(why.to_string()))?,
                    #[cfg(target_os = "linux")]
                    _vocabulary: None,
                })
            }
            #[cfg(target_os = "linux")]
            Isolation::Sequence => Self::in_processes(config),
            #[cfg(not(target_os = "linux"))]
            Isolation::Sequence => Err(CliError::usage(
                "--isolation sequence: this system does not have it; use shared",
            )),
        }
    }

    #[cfg(target_os = "linux")]
    fn in_processes(config: &ControllersConfig) -> Result<Self, CliError> {
        use std::io::Write as _;
        use std::os::fd::AsRawFd as _;
        use std::path::Path;

        use sapwood_control::host::HostConfig;
        use sapwood_control::trie::TokenView;

        use super::super::aicirt::{PROCESSES_MAX, template_command};
        use super::module_test::scripted_engine;
        use crate::controllers::{ControlNames, host_model};

        let failed =
            |why: &dyn std::fmt::Display| CliError::new(format!("--isolation sequence: {why}"));
        // Every scripted model of these tests has this vocabulary.
        let engine = scripted_engine("")?;
        let model = host_model(engine.vocabulary(), ControlNames::Text);
        engine.end();
        // Without a name, so that nothing of it is left behind.
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("sapwood-vocabulary", flags);
        let mut file = std::fs::File::from(file.map_err(|why| failed(&why))?);
        let written = file.write_all(model.trie(TokenView::Named));
        written.map_err(|why| failed(&why))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let config = HostConfig {
            instances: PROCESSES_MAX,
            ..host_config(config)
        };
        let host = Host::in_processes(config, template_command(path.as_ref(), Path::new("."))?);
        Ok(Self {
            host: host.map_err(|why| failed(&why))?,
            _vocabulary: Some(file),
        })
    }

    pub(super) fn host(&self) -> Host {
        self.host.clone()
    }
}
