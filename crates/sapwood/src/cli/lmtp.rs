//! `sapwood lmtp`: LMTP over standard input and output, one message a line (LM-110).
//!
//! ```text
//!   configuration ─► models ─► lines in, lines out ─► end of input: what runs finishes ─► exit code
//! ```

use std::time::Duration;

use clap::{Args, ValueEnum};
use sapwood_net::lmtp::{BridgeEnd, ConnectOptions, PeerAddress, bridge};
use sapwood_proto::lmtp::LmtpError;
use sapwood_proto::secret::SecretUrl;
use sapwood_server::Server;
use sapwood_server::faces::lmtp::{LinesEnd, LmtpService};
use sapwood_server::ops::drain;
use tokio::signal::unix::{SignalKind, signal};

use super::{Common, ModelFlags, log_filter};
use crate::config::Config;
use crate::config::endpoint::warn_of_plain_text;
use crate::config::layers::Flags;
use crate::controllers::ProcessControllers;
use crate::failure::{CliError, Exit};
use crate::hub::ModelCache;
use crate::logs::Logs;
use crate::{model_loading, models};

#[derive(Debug, Args)]
pub(super) struct LmtpCommand {
    /// Relay to an LMTP server instead of serving local models: HOST:PORT, ws://HOST:PORT/lmtp, wss://.., unix:PATH
    #[arg(long, value_name = "URL")]
    connect: Option<SecretUrl>,
    /// What happens to running streams at the end of input
    #[arg(long, value_enum, default_value_t = OnEof::Finish, value_name = "WHAT")]
    on_eof: OnEof,
    #[command(flatten)]
    models: ModelFlags,
}

/// What happens to running streams at the end of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnEof {
    /// They finish.
    Finish,
    /// They end at once.
    Cancel,
}

impl LmtpCommand {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        let mut flags = Flags::default();
        self.models.set(&mut flags)?;
        let layers = common.layers(flags)?;
        let config = layers.config()?;
        // With a queue, as for a server: a parent process that does not read standard error must not block the streams.
        Logs::serve(log_filter(&config, common.log.as_deref()))?;
        layers.warn_unknown_keys();
        if let Some(url) = &self.connect {
            return self.bridge(&config, url).await;
        }
        let planned = models::plan_without_server(&config)?;
        let settings = sapwood_server::Config {
            // There are no other clients, so the drain needs no delay for load balancers and starts at once.
            drain: drain::Config {
                grace: Duration::ZERO,
                deadline: Duration::ZERO,
                last_word: LAST_WORDS,
            },
            ..sapwood_server::Config::default()
        };
        let builder = Server::builder(settings, Vec::new());
        let shared = builder
            .map_err(|error| CliError::new(error.to_string()))?
            .shared()
            .clone();
        let kernel = model_loading::kernel(&config, &planned)?;
        // Before the first line is read: unlike a port, a pipe keeps its input until then.
        let controllers = ProcessControllers::new(&config.controllers)?;
        // Its locks last as long as the models are served.
        let cache = ModelCache::new(&config.hub);
        // All, whatever `load` says: the parent process waits for the first line, and may ask for any of them.
        model_loading::load(&kernel, &controllers, &cache, planned).await?;
        let lmtp = LmtpService::new(
            shared.clone(),
            kernel,
            config
                .lmtp
                .face(config.default_model.clone(), &config.limits),
        );
        let mut terminate = signal(SignalKind::terminate())
            .map_err(|error| CliError::new(format!("cannot watch signals: {error}")))?;
        let cancel = self.on_eof == OnEof::Cancel;
        let serving = lmtp.serve_connection(tokio::io::stdin(), tokio::io::stdout(), cancel);
        tokio::pin!(serving);
        // Waiting for a signal may be cancelled; the conversation is not dropped by it.
        let ended = tokio::select! {
            ended = &mut serving => ended,
            _ = terminate.recv() => {
                let (ended, outcome) = futures::join!(serving, shared.drain.run());
                if outcome.cut > 0 { LinesEnd::Cut } else { ended }
            }
        };
        Ok(match ended {
            LinesEnd::Finished => Exit::Ok,
            LinesEnd::Cut => Exit::Cut,
        })
    }
}

impl LmtpCommand {
    /// Relays between the lines here and a server.
    async fn bridge(&self, config: &Config, url: &SecretUrl) -> Result<Exit, CliError> {
        let wrong =
            |error: LmtpError| CliError::usage(format!("--connect {url}: {}", error.message));
        let mut address = PeerAddress::parse(url.expose()).map_err(wrong)?;
        let access = config.client.access()?;
        // A key in the address wins, and the other one is not sent at all (D-46).
        if let Some(key) = access.key.filter(|_| !address.has_own_key()) {
            address = address.with_key(key);
        }
        if let Some(pem) = access.authorities {
            address = address.with_authorities(pem);
        }
        if address.exposes_key() {
            warn_of_plain_text(&url.to_string());
        }
        let (input, output) = (tokio::io::stdin(), tokio::io::stdout());
        let cancel = self.on_eof == OnEof::Cancel;
        let ended = bridge(&address, &ConnectOptions::default(), input, output, cancel).await;
        match ended {
            Ok(BridgeEnd::Finished) => Ok(Exit::Ok),
            Ok(BridgeEnd::Cut) => Ok(Exit::Cut),
            Err(error) => {
                let what = format!("--connect {url}: {}", error.message);
                Err(CliError::exit(Exit::Unreachable, what))
            }
        }
    }
}

/// Timeout for the last output.
const LAST_WORDS: Duration = Duration::from_secs(2);
