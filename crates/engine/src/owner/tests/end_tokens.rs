//! What an end token that a controller does not confirm is for each side (AI-804).

use std::sync::{Arc, Mutex};

use sapwood_proto::steer::Token;

use super::harness::Bench;
use super::hooked_model::{HookedModel, OnDecode};
use super::probe::Probe;
use super::steering::steered;
use crate::Config;
use crate::model::BatchEntry;
use crate::scripted::Config as Script;

/// The end token.
const END: Token = 257;
const SPACE: Token = 32;

#[test]
fn ai_804_the_controller_sees_the_end_token_and_the_model_a_space_in_its_place() {
    let computed = Arc::<Mutex<Vec<Token>>>::default();
    let seen = Arc::clone(&computed);
    let hook = OnDecode(move |batch: &[BatchEntry]| {
        let tokens = batch.iter().map(|entry| entry.token);
        seen.lock().unwrap().extend(tokens);
    });
    let model = HookedModel::new(Script::default(), hook);
    let probe = Probe::new();
    let mut request = steered("a", &probe);
    request.params.max_tokens = Some(4);
    let answer = Bench::over(Box::new(model), Config::default()).answer(request);
    // The client has what was sampled, and no text of it.
    assert_eq!(answer.choices[0].1, [97, END, END, END]);
    assert_eq!(answer.text(), "a");
    let log = probe.log.lock().unwrap();
    let posts: Vec<_> = log.iter().filter(|call| call.starts_with("post")).collect();
    let end = "post 0 [257] Some(257)";
    assert_eq!(posts, ["post 0 [97] Some(97)", end, end, end]);
    // The last one is never computed: nothing follows it.
    let computed = computed.lock().unwrap();
    assert!(computed.ends_with(&[97, SPACE, SPACE]), "{computed:?}");
    assert!(!computed.contains(&END), "{computed:?}");
}
