//! Parses paths below `/v2` (TR-201, TR-202).

use http::Method;
use percent_encoding::percent_decode_str;

use super::restricted::Category;
use crate::auth::scopes::{KeyScope, RouteAccess};

/// The scopes that routes of this face need.
const CALL: RouteAccess = RouteAccess::Needs(KeyScope::Infer);
const MANAGE: RouteAccess = RouteAccess::Needs(KeyScope::Admin);

/// The paths of the router, and the access that each needs. The router matches raw paths, so one that is encoded in
/// another way (`%6coad`) matches a wildcard instead: what needs more than `infer` checks the scope again in its
/// handler.
pub(super) const PATTERNS: &[(&str, RouteAccess)] = &[
    ("/v2", CALL),
    ("/v2/", CALL),
    ("/v2/health/live", RouteAccess::Open),
    ("/v2/health/ready", RouteAccess::Open),
    ("/v2/models/stats", CALL),
    ("/v2/models/{model}", CALL),
    ("/v2/models/{model}/ready", CALL),
    ("/v2/models/{model}/config", CALL),
    ("/v2/models/{model}/stats", CALL),
    ("/v2/models/{model}/generate", CALL),
    ("/v2/models/{model}/generate_stream", CALL),
    ("/v2/models/{model}/infer", CALL),
    ("/v2/models/{model}/trace/setting", CALL),
    ("/v2/models/{model}/versions/{version}", CALL),
    ("/v2/models/{model}/versions/{version}/{*rest}", CALL),
    ("/v2/repository/index", CALL),
    ("/v2/repository/models/{model}/load", MANAGE),
    ("/v2/repository/models/{model}/unload", MANAGE),
    ("/v2/requests/{id}", CALL),
    ("/v2/streams/{name}", CALL),
    ("/v2/trace/setting", CALL),
    ("/v2/logging", CALL),
    ("/v2/{*rest}", CALL),
];

/// A model, and the version that was asked for, as sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) model: String,
    pub(super) version: Option<String>,
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GenerateRoute {
    Server,
    Live,
    Ready,
    Model(Target),
    ModelReady(Target),
    Config(Target),
    Stats(Option<Target>),
    Generate(Target),
    GenerateStream(Target),
    Infer(Target),
    /// The running requests of an id.
    Request(String),
    /// A stream that can be resumed.
    Stream(String),
    Index,
    Load(String),
    Unload(String),
    /// A path that names a repository, which is not supported.
    Repository,
    Trace,
    Logging,
    /// Shared memory of either kind.
    Memory(MemoryAct),
}

/// The actions on shared memory (TR-708).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryAct {
    Status,
    Register,
    Unregister,
}

impl GenerateRoute {
    /// Reads a raw path. `None`: there is no such route.
    pub(super) fn read(path: &str) -> Option<Self> {
        let rest = path.strip_prefix("/v2")?;
        if rest.is_empty() {
            return Some(Self::Server);
        }
        // Split before it is decoded: `%2F` is a part of a name, and no separator (TR-201).
        let segments = rest.strip_prefix('/')?.split('/').map(decode);
        let segments: Vec<String> = segments.collect::<Option<_>>()?;
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        Some(match segments.as_slice() {
            ["health", "live"] => Self::Live,
            ["health", "ready"] => Self::Ready,
            // Before the models, so that one called `stats` is reached only by its other paths.
            ["models", "stats"] => Self::Stats(None),
            ["models", model, "versions", version, rest @ ..] if is_number(version) => {
                Self::about(model, Some(version), rest)?
            }
            ["models", model, rest @ ..] if !model.is_empty() => Self::about(model, None, rest)?,
            ["repository", "index"] => Self::Index,
            ["repository", "models", model, "load"] => Self::Load((*model).into()),
            ["repository", "models", model, "unload"] => Self::Unload((*model).into()),
            ["repository", _, "index"] | ["repository", _, "models", _, "load" | "unload"] => {
                Self::Repository
            }
            ["trace", "setting"] => Self::Trace,
            ["logging"] => Self::Logging,
            ["requests", id] if !id.is_empty() => Self::Request((*id).into()),
            ["streams", name] if !name.is_empty() => Self::Stream((*name).into()),
            ["systemsharedmemory" | "cudasharedmemory", rest @ ..] => Self::Memory(match rest {
                ["status"] | ["region", _, "status"] => MemoryAct::Status,
                ["region", _, "register"] => MemoryAct::Register,
                ["unregister"] | ["region", _, "unregister"] => MemoryAct::Unregister,
                _ => return None,
            }),
            _ => return None,
        })
    }

    fn about(model: &str, version: Option<&str>, rest: &[&str]) -> Option<Self> {
        let target = Target {
            model: model.into(),
            version: version.map(str::to_owned),
        };
        Some(match rest {
            [] => Self::Model(target),
            ["ready"] => Self::ModelReady(target),
            ["config"] => Self::Config(target),
            ["stats"] => Self::Stats(Some(target)),
            ["generate"] => Self::Generate(target),
            ["generate_stream"] => Self::GenerateStream(target),
            ["infer"] => Self::Infer(target),
            ["trace", "setting"] if version.is_none() => Self::Trace,
            _ => return None,
        })
    }

    /// The methods that it takes, as the header `Allow` names them.
    pub(super) const fn allow(&self) -> &'static str {
        match self {
            Self::Generate(_)
            | Self::GenerateStream(_)
            | Self::Infer(_)
            | Self::Index
            | Self::Load(_)
            | Self::Unload(_)
            | Self::Repository
            | Self::Memory(MemoryAct::Register | MemoryAct::Unregister) => "POST",
            Self::Trace | Self::Logging => "GET, HEAD, POST",
            Self::Request(_) => "DELETE",
            Self::Stream(_) => "GET, HEAD, DELETE",
            _ => "GET, HEAD",
        }
    }

    /// The category of the protocol that it belongs to (TR-210).
    pub(super) const fn category(&self) -> Category {
        match self {
            Self::Live | Self::Ready | Self::ModelReady(_) => Category::Health,
            Self::Server | Self::Model(_) => Category::Metadata,
            Self::Config(_) => Category::ModelConfig,
            Self::Stats(_) => Category::Statistics,
            Self::Index | Self::Load(_) | Self::Unload(_) | Self::Repository => {
                Category::ModelRepository
            }
            Self::Trace => Category::Trace,
            Self::Logging => Category::Logging,
            Self::Memory(_) => Category::SharedMemory,
            Self::Generate(_)
            | Self::GenerateStream(_)
            | Self::Infer(_)
            | Self::Request(_)
            | Self::Stream(_) => Category::Inference,
        }
    }

    pub(super) fn takes(&self, method: &Method) -> bool {
        self.allow().split(", ").any(|name| name == method.as_str())
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Decodes a segment; `None` if it is badly encoded or not UTF-8.
fn decode(segment: &str) -> Option<String> {
    // Checked here, because the decoder passes a bad escape through as it is, and TR-201 has 404 for it.
    let mut bytes = segment.bytes();
    while let Some(byte) = bytes.next() {
        let hex = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_hexdigit());
        if byte == b'%' && !(hex(bytes.next()) && hex(bytes.next())) {
            return None;
        }
    }
    percent_decode_str(segment)
        .decode_utf8()
        .ok()
        .map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(model: &str, version: Option<&str>) -> Target {
        Target {
            model: model.into(),
            version: version.map(str::to_owned),
        }
    }

    #[test]
    fn tr_201_a_path_is_split_and_then_decoded() {
        for (path, expect) in [
            ("/v2", Some(GenerateRoute::Server)),
            ("/v2/", None),
            (
                "/v2/models/m",
                Some(GenerateRoute::Model(target("m", None))),
            ),
            (
                "/v2/models/org%2Fname/generate",
                Some(GenerateRoute::Generate(target("org/name", None))),
            ),
            ("/v2/models/m%/generate", None),
            ("/v2/models/m%2/generate", None),
            ("/v2/models/%ff/generate", None),
            (
                "/v2/models/m/versions/7/generate_stream",
                Some(GenerateRoute::GenerateStream(target("m", Some("7")))),
            ),
            ("/v2/models/m/versions/x/generate", None),
            ("/v2/models/m/versions/-1/generate", None),
            ("/v2/models/m/versions//generate", None),
            ("/v2/models/m/generate/", None),
            ("/v2/models/m/generate/more", None),
            ("/v2/models//generate", None),
            ("/v2/models/stats", Some(GenerateRoute::Stats(None))),
            ("/v2/repository/index", Some(GenerateRoute::Index)),
            ("/v2/repository/mine/index", Some(GenerateRoute::Repository)),
            (
                "/v2/cudasharedmemory/region/a%20b/register",
                Some(GenerateRoute::Memory(MemoryAct::Register)),
            ),
            (
                "/v2/requests/a%2Fb",
                Some(GenerateRoute::Request("a/b".into())),
            ),
            ("/v2/requests/", None),
            (
                "/v2/streams/a-_9",
                Some(GenerateRoute::Stream("a-_9".into())),
            ),
            ("/v2/streams", None),
            ("/v2/streams/a/b", None),
            ("/v2/health", None),
        ] {
            assert_eq!(GenerateRoute::read(path), expect, "{path}");
        }
    }
}
