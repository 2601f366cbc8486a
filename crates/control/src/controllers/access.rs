//! Who may do what with controllers (AI-312, AI-902).
//!
//! | | admin | scope `control` | other |
//! |---|---|---|---|
//! | upload, run by id or any tag | yes | yes | no |
//! | run a public tag, or one that begins with `USER.` | yes | yes | yes |
//! | set and delete tags | any | those that begin with `USER.` | no |
//! | delete a module | any | its own | no |

use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{SteerRefusal, SteerUser, TagInfo};

pub(super) fn may_upload(user: SteerUser<'_>) -> Result<(), SteerRefusal> {
    allowed(may_control(user), || {
        "uploading controllers needs a key with scope control".to_owned()
    })
}

pub(super) fn may_run_by_id(user: SteerUser<'_>) -> Result<(), SteerRefusal> {
    allowed(may_control(user), || {
        "running a controller by its id needs a key with scope control: use a public tag".to_owned()
    })
}

pub(super) fn may_run(user: SteerUser<'_>, tag: &TagInfo) -> Result<(), SteerRefusal> {
    let may = tag.public || may_control(user) || is_own(user, &tag.tag);
    allowed(may, || format!("permission denied for tag {}", tag.tag))
}

/// Who may change tags at all; then [`may_change_tag`] decides on each.
pub(super) fn may_change_tags(user: SteerUser<'_>) -> Result<(), SteerRefusal> {
    allowed(may_control(user), || {
        "changing tags needs a key with scope control".to_owned()
    })
}

pub(super) fn may_change_tag(user: SteerUser<'_>, tag: &str) -> Result<(), SteerRefusal> {
    allowed(user.is_admin || is_own(user, tag), || {
        format!(
            "permission denied for tag name {}: begin it with {}.",
            clip::shown(tag),
            clip::shown(user.name)
        )
    })
}

pub(super) fn may_describe(user: SteerUser<'_>, owner: &str) -> Result<(), SteerRefusal> {
    allowed(may_control(user) || user.name == owner, || {
        "describing this module needs a key with scope control".to_owned()
    })
}

/// Whether listings show the user a module.
pub(super) fn sees(user: SteerUser<'_>, owner: &str) -> bool {
    user.is_admin || user.name == owner
}

pub(super) fn may_delete(user: SteerUser<'_>, owner: &str) -> Result<(), SteerRefusal> {
    allowed(
        user.is_admin || (user.may_control && user.name == owner),
        || "permission denied: only its owner and admins delete a module".to_owned(),
    )
}

const fn may_control(user: SteerUser<'_>) -> bool {
    user.is_admin || user.may_control
}

/// Whether a tag is in the user's own name space.
fn is_own(user: SteerUser<'_>, tag: &str) -> bool {
    // Nobody owns the tags that begin with a dot; there are none either.
    !user.name.is_empty()
        && tag
            .strip_prefix(user.name)
            .is_some_and(|rest| rest.starts_with('.'))
}

fn allowed(may: bool, message: impl FnOnce() -> String) -> Result<(), SteerRefusal> {
    if may {
        return Ok(());
    }
    Err(SteerRefusal {
        code: Code::PermissionDenied,
        reason: ErrorReason::INSUFFICIENT_SCOPE,
        message: message(),
    })
}
