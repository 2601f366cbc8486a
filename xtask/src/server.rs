//! Runs the server of the build under test, for lanes that connect to it from outside.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context, Result};

use crate::{ci, process};

/// A server of the build under test. Dropping it ends the process.
pub(crate) struct Server {
    child: Child,
    /// `HOST:PORT`.
    pub(crate) address: String,
}

impl Server {
    /// Builds the server, starts it on a free port and waits for the log line with its address.
    ///
    /// # Errors
    /// The build fails, or the server ends before it listens.
    pub(crate) fn start(config: &Path) -> Result<Self> {
        let binary = ci::build_server()?.display().to_string();
        let config = config.display().to_string();
        let mut child = process::program(
            &binary,
            &["serve", "--config", &config, "--listen", "127.0.0.1:0"],
        )
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start the server")?;
        let log = BufReader::new(child.stderr.take().context("the server has no log")?);
        let mut lines = log.lines().map_while(Result::ok);
        let address = lines.find_map(|line| {
            let (_, rest) = line.split_once("http://")?;
            Some(
                rest.chars()
                    .take_while(|c| !matches!(c, '"' | ' ' | '/'))
                    .collect::<String>(),
            )
        });
        let Some(address) = address else {
            let status = child.wait()?;
            anyhow::bail!("the server ended before it listened ({status})");
        };
        // The rest of the log is read so that the server never waits for its reader.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, address })
    }

    /// The id of its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have exited by itself, which has the same effect.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
