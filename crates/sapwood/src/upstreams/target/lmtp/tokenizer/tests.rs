//! Tests of the facts of servers, and of configured files.

use std::sync::Arc;

use sapwood_server::ops::metrics::ServerMetrics;

use super::*;
use crate::upstreams::{Pools, Watchers};

#[test]
fn lm_712_facts_name_the_file_and_the_special_tokens() {
    let reply = TokenizerFacts::of(Some(
        r#"{"vocab_size":9,"bos":1,"eos":[2,3],"tokenizer":{"vocab_size":8,"bos":1,"add_bos":false,"sha256":"00",
        "url":"/lmtp/tokenizer/m","infill":{"prefix":4,"suffix":5,"middle":6,"suffix_first":true}}}"#,
    ));
    assert_eq!(reply.file, Some(("/lmtp/tokenizer/m".into(), "00".into())));
    assert_eq!(reply.size, Some(8));
    let ends = SpecialTokens {
        bos: Some(None),
        ends: vec![2, 3],
        infill: Some(InfillTokens {
            prefix: 4,
            suffix: 5,
            middle: 6,
            suffix_first: true,
        }),
    };
    assert_eq!(reply.ends, ends);
    let adding = TokenizerFacts::of(Some(r#"{"bos":1,"tokenizer":{"add_bos":true}}"#));
    assert_eq!(adding.ends.bos, Some(Some(1)));
    for little in [
        None,
        Some("<unavailable>"),
        Some("{}"),
        Some(r#"{"tokenizer":null}"#),
    ] {
        let reply = TokenizerFacts::of(little);
        assert_eq!(
            (reply.file, reply.size, reply.ends),
            (None, None, SpecialTokens::default())
        );
    }
}

/// A model of servers that are not connected here, with the tokenizer at this path.
fn peers(tokenizer: Option<PathBuf>) -> PeerPool {
    PeerPool {
        name: "m".into(),
        endpoints: Vec::new(),
        settings: Default::default(),
        tokenizer,
        context: None,
        parsers: sapwood_kernel::OutputParsers::default(),
        defaults: sapwood_kernel::SamplingDefaults::default(),
        watchers: Watchers {
            metrics: Arc::new(ServerMetrics::new().unwrap()),
            pools: Pools::default(),
        },
    }
}

/// The letters as tokens.
fn letters() -> String {
    let vocab: Vec<_> = (b'a'..=b'z')
        .enumerate()
        .map(|(id, letter)| format!("\"{}\":{id}", char::from(letter)))
        .collect();
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,
        "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"vocab":{{{}}},"merges":[]}}}}"#,
        vocab.join(",")
    )
}

#[tokio::test]
async fn lm_712_a_configured_tokenizer_has_as_many_tokens_as_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, letters()).unwrap();
    for path in [path.clone(), folder.path().into()] {
        for facts in ["{}", r#"{"vocab_size":26}"#] {
            let found = find(Some(facts), &peers(Some(path.clone()))).await;
            assert!(found.unwrap().is_some(), "{facts}");
        }
        let other = find(Some(r#"{"vocab_size":27}"#), &peers(Some(path))).await;
        let status = other.err().unwrap();
        assert_eq!(status.code, Code::InvalidRequest);
        assert!(status.message.contains("26 tokens"), "{}", status.message);
    }
    assert!(find(None, &peers(None)).await.unwrap().is_none());
    // A file that no server provides is left out.
    let named = r#"{"tokenizer":{"url":"/x","sha256":"00"}}"#;
    assert!(find(Some(named), &peers(None)).await.unwrap().is_none());
    let missing = peers(Some(folder.path().join("absent")));
    assert!(find(None, &missing).await.is_err());
    std::fs::write(&path, "{}").unwrap();
    assert!(find(None, &peers(Some(path))).await.is_err());
}
