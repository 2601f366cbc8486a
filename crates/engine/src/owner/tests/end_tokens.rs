//! What an end token that a controller does not confirm is for each side (AI-804).

use std::sync::{Arc, Mutex};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::harness::Bench;
use super::probe::Probe;
use super::steering::steered;
use crate::Config;
use crate::api::{ModelInfo, SharedVocabulary};
use crate::model::{BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::scripted::{Config as Script, Scripted};

/// A scripted model that notes each token that it computes.
struct Noting {
    model: Scripted,
    computed: Arc<Mutex<Vec<Token>>>,
}

impl Model for Noting {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }
    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }
    fn capacity(&self) -> Capacity {
        self.model.capacity()
    }
    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.model.open(slot, opening);
    }
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.model.fork(from, to, tokens);
    }
    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.model.truncate(slot, tokens);
    }
    fn release(&mut self, slot: SlotId) {
        self.model.release(slot);
    }
    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        let tokens = batch.iter().map(|entry| entry.token);
        self.computed.lock().unwrap().extend(tokens);
        self.model.decode(batch, now)
    }
    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_> {
        self.model.row(index, now)
    }
}

/// The end token.
const END: Token = 257;
const SPACE: Token = 32;

#[test]
fn ai_804_the_controller_sees_the_end_token_and_the_model_a_space_in_its_place() {
    let computed = Arc::<Mutex<Vec<Token>>>::default();
    let model = Noting {
        model: Scripted::new(Script::default()).unwrap(),
        computed: Arc::clone(&computed),
    };
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
