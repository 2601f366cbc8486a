//! Requests to a runtime, as they go on the wire (AI-302, AI-401, AI-411, AI-501).

use sapwood_proto::steer::Token;
use serde::Serialize;

/// An op of the main channel that runs callbacks.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "op")]
pub(super) enum MainRequest {
    /// P1: what happened, and what comes next.
    #[serde(rename = "post_pre_process")]
    PostPre {
        post_ops: Vec<PostOp>,
        pre_ops: Vec<PreOp>,
        freed: Vec<u64>,
    },
    /// P1: masks.
    #[serde(rename = "mid_process")]
    Mid { ops: Vec<MidOp> },
    /// P2.
    #[serde(rename = "mid_process")]
    Process {
        ops: Vec<ProcessOp>,
        freed: Vec<u64>,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct PostOp {
    pub(super) id: u64,
    pub(super) tokens: Vec<Token>,
    pub(super) backtrack: u32,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct PreOp {
    pub(super) id: u64,
    pub(super) req_id: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct MidOp {
    pub(super) id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clone_id: Option<u64>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct ProcessOp {
    pub(super) id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) req_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clone_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clone_idx: Option<u32>,
    pub(super) sampled: Option<Token>,
    pub(super) tokens: Vec<Token>,
    pub(super) backtrack: u32,
}

impl MainRequest {
    /// The sequences that it lists, in its order.
    pub(super) fn ids(&self) -> Vec<u64> {
        match self {
            Self::PostPre {
                post_ops, pre_ops, ..
            } => {
                let bound = pre_ops.iter().map(|op| op.id);
                post_ops.iter().map(|op| op.id).chain(bound).collect()
            }
            Self::Mid { ops } => ops.iter().map(|op| op.id).collect(),
            Self::Process { ops, .. } => ops.iter().map(|op| op.id).collect(),
        }
    }

    /// The ids of the instances that it binds to sequences.
    pub(super) fn bound(&self) -> Vec<String> {
        match self {
            Self::PostPre { pre_ops, .. } => pre_ops.iter().map(|op| op.req_id.clone()).collect(),
            Self::Mid { .. } => Vec::new(),
            Self::Process { ops, .. } => ops.iter().filter_map(|op| op.req_id.clone()).collect(),
        }
    }

    /// The message.
    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }
}

/// An op of the side channel.
#[derive(Debug, Serialize)]
pub(super) struct SideRequest<'a> {
    #[serde(rename = "$rid")]
    pub(super) rid: String,
    #[serde(rename = "$auth")]
    pub(super) user: WireAuth<'a>,
    #[serde(flatten)]
    pub(super) op: SideOp<'a>,
}

/// On whose behalf.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct WireAuth<'a> {
    pub(super) user: &'a str,
    pub(super) is_admin: bool,
}

#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum SideOp<'a> {
    MkModule {
        /// In base64.
        binary: String,
    },
    Instantiate {
        req_id: &'a str,
        prompt: &'a [Token],
        module_id: &'a str,
        module_arg: &'a str,
    },
    /// Ours alone.
    Stats {},
    /// Ours alone; other runtimes answer `bad op`, and drop the instance in time.
    Drop { req_id: &'a str },
    /// Ours alone.
    Cancel { rid: &'a str },
}

impl SideRequest<'_> {
    /// The message.
    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    // Cannot fail: structs of ours with keys that are strings. A runtime answers an empty message with an error.
    serde_json::to_vec(message).unwrap_or_default()
}

/// A message without members, to the main channel.
pub(super) const PING: &[u8] = br#"{"op":"ping"}"#;
/// As [`PING`].
pub(super) const TOKENS: &[u8] = br#"{"op":"tokens"}"#;

/// The features of the wire that the engine uses (AI-1001): what suspended sequences wait for.
pub(super) const HELLO: &[u8] = br#"{"op":"hello","features":["wait"]}"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn check(request: &MainRequest, expected: &str) {
        assert_eq!(String::from_utf8(request.encode()).unwrap(), expected);
    }

    /// The lines of the page's transcript.
    #[test]
    fn ai_401_requests_of_p1_are_those_of_the_transcript() {
        let (id, req_id) = (4, "r7".to_owned());
        let bind = MainRequest::PostPre {
            post_ops: Vec::new(),
            pre_ops: vec![PreOp { id, req_id }],
            freed: Vec::new(),
        };
        check(
            &bind,
            r#"{"op":"post_pre_process","post_ops":[],"pre_ops":[{"id":4,"req_id":"r7"}],"freed":[]}"#,
        );
        let post = PostOp {
            id,
            tokens: vec![3582],
            backtrack: 0,
        };
        let post = MainRequest::PostPre {
            post_ops: vec![post],
            pre_ops: Vec::new(),
            freed: vec![9],
        };
        check(
            &post,
            r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[3582],"backtrack":0}],"pre_ops":[],"freed":[9]}"#,
        );
        let op = |id, clone_id| MidOp { id, clone_id };
        let mid = MainRequest::Mid {
            ops: vec![op(4, None), op(5, Some(4))],
        };
        check(
            &mid,
            r#"{"op":"mid_process","ops":[{"id":4},{"id":5,"clone_id":4}]}"#,
        );
    }

    #[test]
    fn ai_501_requests_of_p2_name_the_request_or_the_parent_once() {
        let op = |id| ProcessOp {
            id,
            req_id: None,
            clone_id: None,
            clone_idx: None,
            sampled: None,
            tokens: Vec::new(),
            backtrack: 0,
        };
        let first = ProcessOp {
            req_id: Some("r8".to_owned()),
            ..op(4)
        };
        let clone = ProcessOp {
            clone_id: Some(4),
            clone_idx: Some(1),
            sampled: Some(99),
            tokens: vec![99],
            ..op(5)
        };
        let request = MainRequest::Process {
            ops: vec![first, clone],
            freed: Vec::new(),
        };
        check(
            &request,
            concat!(
                r#"{"op":"mid_process","ops":[{"id":4,"req_id":"r8","sampled":null,"tokens":[],"backtrack":0},"#,
                r#"{"id":5,"clone_id":4,"clone_idx":1,"sampled":99,"tokens":[99],"backtrack":0}],"freed":[]}"#
            ),
        );
        assert_eq!(request.ids(), [4, 5]);
    }

    #[test]
    fn ai_302_the_side_channel_gets_the_name_of_the_user() {
        let request = SideRequest {
            rid: "a1".to_owned(),
            user: WireAuth {
                user: "ada",
                is_admin: false,
            },
            op: SideOp::Instantiate {
                req_id: "r7",
                prompt: &[1],
                module_id: "yes-latest",
                module_arg: "",
            },
        };
        assert_eq!(
            String::from_utf8(request.encode()).unwrap(),
            concat!(
                r#"{"$rid":"a1","$auth":{"user":"ada","is_admin":false},"op":"instantiate","req_id":"r7","#,
                r#""prompt":[1],"module_id":"yes-latest","module_arg":""}"#
            )
        );
    }
}
