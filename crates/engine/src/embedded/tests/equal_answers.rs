//! What a model promises about equal answers, it keeps to the last bit.

use super::*;

/// Whether this machine lets a model promise anything; asked after one was loaded.
pub(super) fn may_promise() -> bool {
    let may_promise = llama::has_own_attention() && !llama::has_gpu();
    assert!(may_promise || !cfg!(all(target_arch = "x86_64", target_feature = "avx2")));
    may_promise
}

/// The row after a text in one batch, after it token by token, and after it beside another one that was begun before.
fn rows(model: &mut Embedded, text: &[Token]) -> [Vec<f32>; 3] {
    for slot in 0..4 {
        model.open(slot, &opening());
    }
    let whole = row(model, &entries(0, 0, text));
    let single = |(at, token): (usize, &Token)| row(model, &entries(1, at as u32, &[*token]));
    let single = text.iter().enumerate().map(single).last().unwrap();
    let (begin, rest) = text.split_at(text.len() / 3);
    let _ = row(model, &entries(2, 0, rest));
    let _ = row(model, &entries(3, 0, begin));
    let at = begin.len() as u32;
    let beside = [entries(2, rest.len() as u32, begin), entries(3, at, rest)].concat();
    [whole, single, row(model, &beside)]
}

#[test]
fn d_21_the_demo_model_promises_equal_answers_and_keeps_that() {
    let path = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../demo/sapwood-demo.gguf"
    ));
    if !path.is_file() {
        eprintln!("skipped: the demo model is not there");
        return;
    }
    let of = |cache_tokens| {
        let options = LoadOptions {
            parallel: 4,
            kept_prefixes: Some(0),
            cache_tokens,
            context_tokens: Some(512),
            threads: Some(1),
            ..LoadOptions::default()
        };
        load(
            "demo",
            &ModelSource::File(path.clone()),
            &options,
            &mut |_| true,
        )
        .unwrap()
    };
    let mut model = of(None);
    let may_promise = may_promise();
    assert_eq!(model.info().deterministic, Some(may_promise));
    let text: Vec<Token> = (0..100).map(|it| (it * 37 + 11) % 1000).collect();
    let [whole, single, beside] = rows(&mut model, &text);
    alike(&whole, &single);
    if may_promise {
        assert!(whole == single && whole == beside);
    }
    let shared = of(Some(1024));
    assert_eq!(shared.info().deterministic, Some(false), "shared cells");
}
