//! Parts of the protocol that require an additional header (TR-210), over HTTP and gRPC.

use std::fmt;

use http::{HeaderMap, HeaderName};
use sapwood_proto::code::Code;
use subtle::ConstantTimeEq;

use super::request_error::RequestError;

/// The prefix of a header's name in gRPC metadata.
const OVER_GRPC: &str = "triton-grpc-protocol-";

/// A part of the protocol that can be restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    /// Whether server and models are live and ready.
    Health,
    /// Metadata of server and models.
    Metadata,
    /// Generating and inference, with their streams and cancellations.
    Inference,
    /// Shared memory.
    SharedMemory,
    /// Configurations of models.
    ModelConfig,
    /// The list of models, loading and unloading.
    ModelRepository,
    /// Statistics.
    Statistics,
    /// Settings of traces.
    Trace,
    /// Settings of logs.
    Logging,
}

impl Category {
    /// All of them, with the names that they have in a configuration.
    pub const ALL: [(&'static str, Self); 9] = [
        ("health", Self::Health),
        ("metadata", Self::Metadata),
        ("inference", Self::Inference),
        ("shared-memory", Self::SharedMemory),
        ("model-config", Self::ModelConfig),
        ("model-repository", Self::ModelRepository),
        ("statistics", Self::Statistics),
        ("trace", Self::Trace),
        ("logging", Self::Logging),
    ];

    /// The category of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, category)| *category)
    }

    /// The category of a gRPC method.
    pub(super) fn of_method(method: &str) -> Self {
        match method {
            "ServerLive" | "ServerReady" | "ModelReady" => Self::Health,
            "ServerMetadata" | "ModelMetadata" => Self::Metadata,
            "ModelConfig" => Self::ModelConfig,
            "ModelStatistics" => Self::Statistics,
            "RepositoryIndex" | "RepositoryModelLoad" | "RepositoryModelUnload" => {
                Self::ModelRepository
            }
            "TraceSetting" => Self::Trace,
            "LogSettings" => Self::Logging,
            method if method.contains("SharedMemory") => Self::SharedMemory,
            // Unknown methods as well, so that no call is without a category.
            _ => Self::Inference,
        }
    }
}

/// The header that requests of a category need, and its value.
#[derive(Clone, PartialEq, Eq)]
pub struct Restriction {
    header: HeaderName,
    over_grpc: HeaderName,
    value: String,
}

impl Restriction {
    /// `None` if no header can have this name, or the value is empty.
    #[must_use]
    pub fn new(header: &str, value: &str) -> Option<Self> {
        // A request without the header would have that value too.
        if value.is_empty() {
            return None;
        }
        let named = |name: &str| HeaderName::try_from(name).ok();
        Some(Self {
            header: named(header)?,
            over_grpc: named(&format!("{OVER_GRPC}{header}"))?,
            value: value.into(),
        })
    }

    /// Checks a request over HTTP.
    ///
    /// # Errors
    /// `permission-denied`, 403.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), RequestError> {
        if self.holds(headers, &self.header) {
            return Ok(());
        }
        let message = format!("This API is restricted, expecting header '{}'", self.header);
        Err(RequestError::new(Code::PermissionDenied, message))
    }

    /// The same for a call over gRPC, where the reference has another text and status.
    ///
    /// # Errors
    /// `unavailable`.
    pub(super) fn check_grpc(&self, metadata: &HeaderMap) -> Result<(), RequestError> {
        if self.holds(metadata, &self.over_grpc) {
            return Ok(());
        }
        let message = format!(
            "This protocol is restricted, expecting header '{}'",
            self.over_grpc
        );
        Err(RequestError::new(Code::Unavailable, message))
    }

    fn holds(&self, headers: &HeaderMap, name: &HeaderName) -> bool {
        // In constant time (TR-210), and so without a shortcut for a header that is missing.
        let given = headers.get(name).map_or(&b""[..], |value| value.as_bytes());
        bool::from(given.ct_eq(self.value.as_bytes()))
    }
}

/// The value is a secret.
impl fmt::Debug for Restriction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Restriction")
            .field("header", &self.header)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_210_debug_output_does_not_show_the_value() {
        let restriction = Restriction::new("Admin-Key", "swordfish").unwrap();
        let shown = format!("{restriction:?}");
        assert!(shown.contains("admin-key") && !shown.contains("swordfish"));
        assert_eq!(Restriction::new("no header", "x"), None);
    }

    /// A missing header would equal it.
    #[test]
    fn tr_210_an_empty_value_restricts_nothing_and_is_refused() {
        assert_eq!(Restriction::new("admin-key", ""), None);
    }

    #[test]
    fn tr_210_only_the_right_header_with_the_right_value_gives_access() {
        let restriction = Restriction::new("admin-key", "swordfish").unwrap();
        for (name, value, http, grpc) in [
            ("admin-key", "swordfish", true, false),
            ("triton-grpc-protocol-admin-key", "swordfish", false, true),
            ("admin-key", "swordfisH", false, false),
            ("admin-key", "swordfish2", false, false),
            ("admin-key", "", false, false),
            ("other", "swordfish", false, false),
        ] {
            let name = HeaderName::try_from(name).unwrap();
            let headers: HeaderMap = [(name, value.parse().unwrap())].into_iter().collect();
            assert_eq!(restriction.check(&headers).is_ok(), http, "{headers:?}");
            let reported = restriction.check_grpc(&headers);
            assert_eq!(reported.is_ok(), grpc, "{headers:?}");
        }
        let none = restriction.check(&HeaderMap::new()).unwrap_err();
        assert_eq!(
            (none.status.as_u16(), none.message.as_str()),
            (403, "This API is restricted, expecting header 'admin-key'")
        );
        let none = restriction.check_grpc(&HeaderMap::new()).unwrap_err();
        assert_eq!(
            (none.code, none.message.as_str()),
            (
                Code::Unavailable,
                "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
            )
        );
    }

    #[test]
    fn tr_210_every_method_has_its_category() {
        for (method, name) in [
            ("ServerLive", "health"),
            ("ModelReady", "health"),
            ("ServerMetadata", "metadata"),
            ("ModelMetadata", "metadata"),
            ("ModelInfer", "inference"),
            ("ModelStreamInfer", "inference"),
            ("ModelConfig", "model-config"),
            ("ModelStatistics", "statistics"),
            ("RepositoryIndex", "model-repository"),
            ("RepositoryModelUnload", "model-repository"),
            ("CudaSharedMemoryRegister", "shared-memory"),
            ("TraceSetting", "trace"),
            ("LogSettings", "logging"),
        ] {
            assert_eq!(
                Some(Category::of_method(method)),
                Category::from_name(name),
                "{method}"
            );
        }
    }
}
