//! `sapwood lmtp`: models behind standard input and output, one message a line (LM-110).
//!
//! ```text
//!   configuration ─► models ─► lines in, lines out ─► end of input: what runs finishes ─► exit code
//! ```

use std::time::Duration;

use clap::{Args, ValueEnum};
use sapwood_net::lmtp::{Address, Bridged, Options, bridge};
use sapwood_proto::lmtp::Fault;
use sapwood_proto::secret::SecretUrl;
use sapwood_server::lmtp::{Ended, Lmtp as Spoken};
use sapwood_server::{Server, drain};
use tokio::signal::unix::{SignalKind, signal};

use super::{Common, ModelFlags, log_filter};
use crate::client::warn_of_plain_text;
use crate::config::Config;
use crate::config::layers::Flags;
use crate::failure::{Exit, Failure};
use crate::logs::Logs;
use crate::{models, serving};

#[derive(Debug, Args)]
pub(super) struct Lmtp {
    /// Speak to a server elsewhere in place of models here: HOST:PORT, ws://HOST:PORT/lmtp, wss://.., unix:PATH
    #[arg(long, value_name = "URL")]
    connect: Option<SecretUrl>,
    /// What becomes of running streams when the input has ended
    #[arg(long, value_enum, default_value_t = OnEof::Finish, value_name = "WHAT")]
    on_eof: OnEof,
    #[command(flatten)]
    models: ModelFlags,
}

/// What becomes of running streams when the input has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnEof {
    /// They finish.
    Finish,
    /// They end at once.
    Cancel,
}

impl Lmtp {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, Failure> {
        let mut flags = Flags::default();
        self.models.set(&mut flags)?;
        let layers = common.layers(flags)?;
        let config = layers.config()?;
        Logs::serve(log_filter(&config, common.log.as_deref()))?;
        layers.tell_strangers();
        if let Some(url) = &self.connect {
            return self.bridge(&config, url).await;
        }
        let planned = models::plan(&config)?;
        let settings = sapwood_server::Config {
            // Nobody else is let in, so there is no time for balancers, and the last words come at once.
            drain: drain::Config {
                grace: Duration::ZERO,
                deadline: Duration::ZERO,
                last_word: LAST_WORDS,
            },
            ..sapwood_server::Config::default()
        };
        let builder = Server::builder(settings, Vec::new());
        let shared = builder
            .map_err(|error| Failure::new(error.to_string()))?
            .shared()
            .clone();
        let kernel = serving::kernel(&config, &planned)?;
        serving::load(&kernel, planned, |_, _, _| {}).await?;
        let lmtp = Spoken::new(
            shared.clone(),
            kernel,
            config
                .lmtp
                .face(config.default_model.clone(), &config.limits),
        );
        let mut terminate = signal(SignalKind::terminate())
            .map_err(|error| Failure::new(format!("cannot watch signals: {error}")))?;
        let cancel = self.on_eof == OnEof::Cancel;
        let spoken = lmtp.speak(tokio::io::stdin(), tokio::io::stdout(), cancel);
        tokio::pin!(spoken);
        // Waiting for a signal may be cancelled; the conversation is only ever put aside.
        let ended = tokio::select! {
            ended = &mut spoken => ended,
            _ = terminate.recv() => {
                let (ended, outcome) = futures::join!(spoken, shared.drain.run());
                if outcome.cut > 0 { Ended::Cut } else { ended }
            }
        };
        Ok(match ended {
            Ended::Finished => Exit::Ok,
            Ended::Cut => Exit::Cut,
        })
    }
}

impl Lmtp {
    /// Lines here, a server there.
    async fn bridge(&self, config: &Config, url: &SecretUrl) -> Result<Exit, Failure> {
        let wrong = |fault: Fault| Failure::usage(format!("--connect {url}: {}", fault.message));
        let mut address = Address::parse(url.expose()).map_err(wrong)?;
        let access = config.client.access()?;
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
        let ended = bridge(&address, &Options::default(), input, output, cancel).await;
        match ended {
            Ok(Bridged::Finished) => Ok(Exit::Ok),
            Ok(Bridged::Cut) => Ok(Exit::Cut),
            Err(fault) => {
                let what = format!("--connect {url}: {}", fault.message);
                Err(Failure::exit(Exit::Unreachable, what))
            }
        }
    }
}

/// How long the last words may take.
const LAST_WORDS: Duration = Duration::from_secs(2);
