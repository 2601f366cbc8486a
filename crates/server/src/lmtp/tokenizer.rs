//! The files of tokenizers, for clients that tokenise by themselves (LM-951).
//!
//! Owns: `tokenizer.json` of a vocabulary of bytes, and how files are served. Refuses to know: other vocabularies; those that were
//! read from a file have it, and models that bring their tokenizer in a form of their own have none.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, header};
use sapwood_engine::api::Vocabulary;
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::Models;
use serde_json::{Map, Value, json};

use super::house::House;
use crate::auth::Caller;
use crate::refusal::Refusal;

/// The file of a vocabulary whose first 256 tokens are the bytes and whose others are control tokens with names.
pub(super) fn file(vocabulary: &dyn Vocabulary, size: u32) -> Option<Bytes> {
    let mut tokens = Map::new();
    for (byte, shown) in (0_u8..=u8::MAX).zip(alphabet()) {
        tokens.insert(shown.to_string(), json!(byte));
    }
    let mut added = Vec::new();
    for token in BYTES..size {
        let name = vocabulary.name(token)?;
        tokens.insert(name.clone(), json!(token));
        added.push(json!({
            "id": token, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": tokens,
            "merges": Value::Array(Vec::new()),
        },
    });
    Some(Bytes::from(file.to_string()))
}

/// Where the file of this model is to be had.
pub(super) fn url(name: &str) -> String {
    let name = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    format!("/lmtp/tokenizer/{name}")
}

/// How bytes are shown in such files: those that print as themselves, the others as characters from 256 on.
fn alphabet() -> impl Iterator<Item = char> {
    let mut moved = 256..;
    (0_u8..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // There are fewer of them than would leave the characters.
        _ => moved.next().and_then(char::from_u32).unwrap_or_default(),
    })
}

/// What answers `GET /lmtp/tokenizer/NAME`.
pub(super) async fn answer(
    house: Arc<House>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Response {
    let caller = request.extensions().get::<Caller>();
    let allowance = caller.and_then(|caller| caller.allowance.clone());
    let permitted = house.catalog.for_caller(allowance).find(&name).is_ok();
    let found = house.catalog.tokenizer(&name).filter(|_| permitted);
    let Some((file, sha256)) = found else {
        let message = "There is no such model, or no tokenizer file of it is known.";
        return Refusal::new(Code::NotFound, "tokenizer_not_found", message).into_response();
    };
    let tag = format!("\"{sha256}\"");
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::ETAG, tag.clone()),
    ];
    if is_known(request.headers(), &tag) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, file).into_response()
}

/// Whether the client has it already.
fn is_known(headers: &HeaderMap, tag: &str) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).into_iter();
    let mut known = known.filter_map(|value| value.to_str().ok());
    known.any(|value| {
        value
            .split(',')
            .any(|known| known.trim() == tag || known.trim() == "*")
    })
}

/// Tokens that are bytes.
const BYTES: u32 = 256;
