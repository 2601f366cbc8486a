//! The ports: the common one, and those that are for one thing alone (TR-908).
//!
//! Owns: the keys `listen`, `listen_grpc`, `listen_metrics` and `preset`, and what they come to together. Refuses to know:
//! sockets.

use sapwood_server::purpose::Purpose;
use serde::{Deserialize, Serialize};

use super::Config;
use crate::failure::Failure;

/// Which ports there are where nothing is said of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Preset {
    /// Those of a Triton server: beside the common one, 8001 for gRPC and 8002 for metrics, on the same host.
    Triton,
}

/// A port, and what sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) purpose: Purpose,
    pub(crate) address: String,
    /// The flag that chooses another one.
    pub(crate) flag: &'static str,
}

impl Config {
    /// The common port.
    pub(crate) fn common_port(&self) -> Port {
        Port {
            purpose: Purpose::Everything,
            address: self.listen.clone(),
            flag: "--listen",
        }
    }

    /// Those beside it.
    pub(crate) fn own_ports(&self) -> Vec<Port> {
        let preset = |port: u16| {
            self.preset
                .map(|Preset::Triton| format!("{}:{port}", self.host()))
        };
        let port = |purpose, flag, said: &Option<String>, usual| {
            let address = said.clone().or_else(|| preset(usual))?;
            Some(Port {
                purpose,
                address,
                flag,
            })
        };
        [
            port(Purpose::Grpc, "--listen-grpc", &self.listen_grpc, GRPC),
            port(
                Purpose::Metrics,
                "--listen-metrics",
                &self.listen_metrics,
                METRICS,
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// The host of the common port; where that is a file or a passed socket, this machine.
    fn host(&self) -> &str {
        let tcp = !self.listen.starts_with("unix:");
        let host = self.listen.rsplit_once(':').filter(|_| tcp);
        host.map_or("127.0.0.1", |(host, _)| host)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// [`Failure::usage`], naming the key.
    pub(super) fn check_ports(&self) -> Result<(), Failure> {
        for (key, said) in [
            ("listen_grpc", &self.listen_grpc),
            ("listen_metrics", &self.listen_metrics),
        ] {
            if said.as_deref() == Some("systemd") {
                let what = format!(
                    "{key}: systemd passes the common socket alone; write HOST:PORT or unix:PATH"
                );
                return Err(Failure::usage(what));
            }
        }
        Ok(())
    }
}

const GRPC: u16 = 8001;
const METRICS: u16 = 8002;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_908_the_preset_has_the_ports_of_triton_on_the_host_of_the_common_one() {
        let ports = |listen: &str, grpc: Option<&str>, preset| {
            let config = Config {
                listen: listen.into(),
                listen_grpc: grpc.map(Into::into),
                preset,
                ..Config::default()
            };
            assert_eq!(config.common_port().address, listen);
            let own = config.own_ports().into_iter();
            own.map(|port| (port.purpose, port.address))
                .collect::<Vec<_>>()
        };
        let triton = Some(Preset::Triton);
        let both = |grpc: &str, metrics: &str| {
            vec![
                (Purpose::Grpc, grpc.to_owned()),
                (Purpose::Metrics, metrics.to_owned()),
            ]
        };
        assert_eq!(ports("127.0.0.1:8000", None, None), []);
        for (listen, grpc, expect) in [
            (
                "127.0.0.1:8000",
                None,
                both("127.0.0.1:8001", "127.0.0.1:8002"),
            ),
            ("[::]:9000", None, both("[::]:8001", "[::]:8002")),
            ("unix:a:b", None, both("127.0.0.1:8001", "127.0.0.1:8002")),
            ("systemd", None, both("127.0.0.1:8001", "127.0.0.1:8002")),
            ("h:1", Some("h:2"), both("h:2", "h:8002")),
        ] {
            assert_eq!(ports(listen, grpc, triton), expect, "{listen}");
        }
        let grpc = vec![(Purpose::Grpc, "h:2".to_owned())];
        assert_eq!(ports("h:1", Some("h:2"), None), grpc);
        let named: Preset = serde_json::from_str("\"triton\"").unwrap();
        assert_eq!(named, Preset::Triton);
        let config = Config {
            listen_metrics: Some("systemd".into()),
            ..Config::default()
        };
        let failure = config.check().unwrap_err();
        assert!(failure.message.starts_with("listen_metrics: "), "{failure}");
    }
}
