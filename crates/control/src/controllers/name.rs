//! [`ControllerName`]: what a string that names a controller means (AI-313, AI-331).

use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::SteerRefusal;

use crate::module::ModuleId;
use crate::store::looks_hex;

/// What a string names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ControllerName {
    /// A module.
    Id(ModuleId),
    /// A tag, which need not exist or have a valid name.
    Tag(String),
    /// A release elsewhere, which a tag stands for.
    Github {
        /// `SELECTOR-latest` or `REPO-latest`.
        tag: String,
    },
}

impl ControllerName {
    pub(super) fn parse(name: &str) -> Result<Self, SteerRefusal> {
        if let Some(reference) = name.strip_prefix("gh:") {
            return github_tag(reference).map(|tag| Self::Github { tag });
        }
        if let Some(id) = ModuleId::parse(name) {
            return Ok(Self::Id(id));
        }
        if looks_hex(name) {
            return Err(invalid_module_id());
        }
        Ok(Self::Tag(name.to_owned()))
    }
}

/// Returns the tag that a `gh:` reference stands for (AI-331).
///
/// # Errors
/// It is not of the form `gh:USER/REPO[/SELECTOR][/VERSION]`.
pub fn tag_of_release(reference: &str) -> Result<String, SteerRefusal> {
    github_tag(reference.strip_prefix("gh:").unwrap_or(reference))
}

/// Reads `USER/REPO[/SELECTOR][/VERSION]`.
fn github_tag(reference: &str) -> Result<String, SteerRefusal> {
    let mut parts: Vec<&str> = reference.split('/').collect();
    if parts.len() > 2 && parts.last().is_some_and(|part| is_version(part)) {
        parts.pop();
    }
    match parts[..] {
        [user, repository, ..]
            if parts.len() <= 3
                && !user.is_empty()
                && !repository.is_empty()
                && parts.last().is_some_and(|last| !last.is_empty()) =>
        {
            let selector = parts.get(2).unwrap_or(&repository);
            Ok(format!("{selector}-latest"))
        }
        _ => Err(refused(
            Code::InvalidRequest,
            "gh: expected gh:USER/REPO[/SELECTOR][/vX.Y]",
        )),
    }
}

/// `latest`, or `v` and a number with more numbers after dots, perhaps of a release that is to come (`v1.2-rc1`).
fn is_version(part: &str) -> bool {
    let Some(version) = part.strip_prefix('v') else {
        return part == "latest";
    };
    let (numbers, pre_release) = version.split_once('-').unwrap_or((version, "rc"));
    !pre_release.is_empty()
        && numbers
            .split('.')
            .all(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Reads the id of requests that accept nothing else.
pub(super) fn module_id(text: &str) -> Result<ModuleId, SteerRefusal> {
    ModuleId::parse(text).ok_or_else(invalid_module_id)
}

pub(super) fn unknown_tag(tag: &str) -> SteerRefusal {
    let message = format!("tag {} not found", clip::shown(tag));
    SteerRefusal {
        code: Code::NotFound,
        reason: ErrorReason::UNKNOWN_CONTROLLER,
        message,
    }
}

pub(super) fn github_disabled() -> SteerRefusal {
    refused(Code::InvalidRequest, "gh: modules are disabled")
}

fn invalid_module_id() -> SteerRefusal {
    refused(Code::InvalidRequest, "invalid module_id")
}

pub(super) fn refused(code: Code, message: &str) -> SteerRefusal {
    SteerRefusal {
        code,
        reason: ErrorReason::BAD_CONFIG,
        message: message.to_owned(),
    }
}
