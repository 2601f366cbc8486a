//! The ports: the common one, and those for a single purpose (TR-908).

use sapwood_server::listener::port_purpose::PortPurpose;
use serde::{Deserialize, Serialize};

use super::Config;
use crate::failure::CliError;

/// Default ports beside the common one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Preset {
    /// Those of a Triton server: beside the common one, 8001 for gRPC and 8002 for metrics, on the same host.
    Triton,
}

/// A port, and the settings that choose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConfiguredPort {
    pub(crate) purpose: PortPurpose,
    pub(crate) address: String,
    /// The flag that chooses it.
    pub(crate) flag: &'static str,
}

impl Config {
    /// The common port.
    pub(crate) fn common_port(&self) -> ConfiguredPort {
        ConfiguredPort {
            purpose: PortPurpose::Everything,
            address: self.listen.clone(),
            flag: "--listen",
        }
    }

    /// The ports beside the common one.
    pub(crate) fn own_ports(&self) -> Vec<ConfiguredPort> {
        let preset = |port: u16| {
            self.preset
                .map(|Preset::Triton| format!("{}:{port}", self.host()))
        };
        let port = |purpose, flag, sent: &Option<String>, usual| {
            // A port that is set wins over the preset's.
            let address = sent.clone().or_else(|| preset(usual))?;
            Some(ConfiguredPort {
                purpose,
                address,
                flag,
            })
        };
        [
            port(PortPurpose::Grpc, "--listen-grpc", &self.listen_grpc, GRPC),
            port(
                PortPurpose::Metrics,
                "--listen-metrics",
                &self.listen_metrics,
                METRICS,
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// The host of the common port; loopback if that is a file or a passed socket.
    fn host(&self) -> &str {
        let tcp = !self.listen.starts_with("unix:");
        // The last colon: an IPv6 address has others.
        let host = self.listen.rsplit_once(':').filter(|_| tcp);
        host.map_or("127.0.0.1", |(host, _)| host)
    }

    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(super) fn check_ports(&self) -> Result<(), CliError> {
        for (key, sent) in [
            ("listen_grpc", &self.listen_grpc),
            ("listen_metrics", &self.listen_metrics),
        ] {
            if sent.as_deref() == Some("systemd") {
                let what = format!(
                    "{key}: systemd passes the common socket alone; write HOST:PORT or unix:PATH"
                );
                return Err(CliError::usage(what));
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
                (PortPurpose::Grpc, grpc.to_owned()),
                (PortPurpose::Metrics, metrics.to_owned()),
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
        let grpc = vec![(PortPurpose::Grpc, "h:2".to_owned())];
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
