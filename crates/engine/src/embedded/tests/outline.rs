//! The facts of a model while it is loading equal those afterwards.

use super::*;

#[test]
fn lm_332_the_outline_matches_the_loaded_model() {
    let source = ModelSource::Bytes(tiny());
    let (info, announced) = outline("tiny", &source, &options()).unwrap();
    let loaded = loaded(&options());
    let received = loaded.info();
    assert_eq!(
        (&info.name, &info.architecture),
        (&received.name, &received.architecture)
    );
    assert_eq!(
        (
            info.context_tokens,
            info.vocabulary_tokens,
            info.parallel,
            info.chat
        ),
        (
            received.context_tokens,
            received.vocabulary_tokens,
            received.parallel,
            received.chat
        )
    );
    let vocabulary = loaded.vocabulary();
    assert_eq!(announced.bos(), vocabulary.bos());
    let mut ends = (0..received.vocabulary_tokens).filter(|&token| announced.is_end(token));
    assert!(ends.clone().count() > 0);
    assert!(ends.all(|token| vocabulary.is_end(token)));
    assert!(!announced.has_text());
}

#[test]
fn lm_332_a_file_that_cannot_be_loaded_has_no_outline() {
    let none = ModelSource::File("/nothing/there.gguf".into());
    assert!(matches!(
        outline("m", &none, &options()),
        Err(LoadError::Missing(_))
    ));
}
