//! The tokenizer of a model that LMTP servers run (LM-712).

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::select_ok;
use sapwood_engine::infill::InfillTokens;
use sapwood_engine::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::PeerPool;

/// The facts of a tokenizer that a server reports.
#[derive(Default)]
struct TokenizerFacts {
    /// Path of the file at the server, and its digest.
    file: Option<(String, String)>,
    size: Option<u64>,
    ends: SpecialTokens,
}

impl TokenizerFacts {
    fn of(facts: Option<&str>) -> Self {
        let facts: Value = facts
            .and_then(|facts| serde_json::from_str(facts).ok())
            .unwrap_or_default();
        let tokenizer = facts.get("tokenizer").unwrap_or(&Value::Null);
        let text = |key: &str| Some(tokenizer.get(key)?.as_str()?.to_owned());
        let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let adds = tokenizer.get("add_bos").and_then(Value::as_bool);
        let first = || tokenizer.get("bos").or_else(|| facts.get("bos"));
        let sizes = [tokenizer.get("vocab_size"), facts.get("vocab_size")];
        let ends = facts.get("eos").and_then(Value::as_array);
        let infill = tokenizer.get("infill").and_then(|infill| {
            let mark = |key: &str| infill.get(key).and_then(token);
            Some(InfillTokens {
                prefix: mark("prefix")?,
                suffix: mark("suffix")?,
                middle: mark("middle")?,
                suffix_first: infill.get("suffix_first").and_then(Value::as_bool)?,
            })
        });
        Self {
            file: text("url").zip(text("sha256")),
            size: sizes.into_iter().flatten().find_map(Value::as_u64),
            ends: SpecialTokens {
                bos: adds.map(|adds| first().and_then(token).filter(|_| adds)),
                ends: ends.into_iter().flatten().filter_map(token).collect(),
                infill,
            },
        }
    }
}

/// The tokenizer of the model of these servers, by the facts that they report; `None` if there is none.
///
/// # Errors
/// `invalid-request` for a configured tokenizer that cannot be used, and for one whose number of tokens is not that of
/// the servers' model.
pub(super) async fn find(
    facts: Option<&str>,
    peers: &PeerPool,
) -> Result<Option<Arc<FileTokenizer>>, Status> {
    let sent = TokenizerFacts::of(facts);
    let mut files = match &peers.tokenizer {
        Some(path) => Some(read(path.clone()).await?),
        None => None,
    };
    let has = |sha256: &str, files: &Option<TokenizerFiles>| {
        let files = files.as_ref();
        files.is_some_and(|files| hex(&files.tokenizer) == *sha256)
    };
    if let Some((url, sha256)) = &sent.file
        // The digest decides: a configured file that is the server's own is not downloaded again.
        && !has(sha256, &files)
    {
        match fetch(peers, url, sha256).await {
            // A chat template beside the configured file belongs to the model as well.
            Ok(file) => files.get_or_insert_default().tokenizer = file,
            Err(why) => tracing::warn!(
                model = peers.name,
                why,
                "the tokenizer of an upstream's model could not be downloaded; the configured one is used, or none"
            ),
        }
    }
    let Some(files) = files else {
        tracing::info!(
            model = peers.name,
            "the tokenizer of an upstream's model is not known: it is served with token ids only"
        );
        return Ok(None);
    };
    let ends = sent.ends;
    let made = tokio::task::spawn_blocking(move || FileTokenizer::new(&files, ends)).await;
    let made = made.map_err(|_| unusable(peers, "its file cannot be read"))?;
    let made = made.map_err(|why| unusable(peers, &why.to_string()))?;
    // A wrong tokenizer gives plausible nonsense and no error, so its size is compared at least (LM-712).
    let size = sapwood_engine::api::Vocabulary::size(&made) as u64;
    if let Some(theirs) = sent.size.filter(|theirs| *theirs != size) {
        let why = format!("it has {size} tokens, and the upstream's model has {theirs}");
        return Err(unusable(peers, &why));
    }
    Ok(Some(Arc::new(made)))
}

/// Reads the configured files.
async fn read(path: PathBuf) -> Result<TokenizerFiles, Status> {
    let shown = path.display().to_string();
    let read = tokio::task::spawn_blocking(move || TokenizerFiles::read(&path)).await;
    let read = read.unwrap_or_else(|failed| Err(std::io::Error::other(failed)));
    read.map_err(|error| {
        let why = format!("the tokenizer at {shown} cannot be read: {error}");
        Status::other(Code::InvalidRequest, "", why)
    })
}

/// Downloads the file with this digest from the first server that has it.
async fn fetch(peers: &PeerPool, url: &str, sha256: &str) -> Result<Bytes, String> {
    let asked = peers.endpoints.iter().map(|endpoint| async move {
        match endpoint.address.fetch(url).await {
            // Against files that are damaged or older than the facts. The server itself has to be trusted for both.
            Ok(file) if hex(&file) == sha256 => Ok(file),
            Ok(_) => Err("the digest of the file is not the announced one".to_owned()),
            Err(error) => Err(error.message.into_owned()),
        }
    });
    let asked: Vec<_> = asked.map(FutureExt::boxed).collect();
    if asked.is_empty() {
        return Err("no server is configured".to_owned());
    }
    // Servers that are not connected are skipped.
    select_ok(asked).await.map(|(file, _)| file)
}

fn unusable(peers: &PeerPool, why: &str) -> Status {
    let why = format!(
        "the tokenizer of the model {} cannot be used: {why}",
        peers.name
    );
    Status::other(Code::InvalidRequest, "", why)
}

fn hex(data: &[u8]) -> String {
    let digest = Sha256::digest(data);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
