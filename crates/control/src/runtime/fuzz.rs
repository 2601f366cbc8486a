//! Fuzz entry point: an engine that sends anything on the main channel, with controllers that return anything.
//!
//! Invariants: every request has one answer, which echoes its `$rid`, fits its room or is an error, and, of a step, has
//! one result for each op and masks that are inside of the region; and when all sequences are freed, none is counted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::steer::{Mask, Token, VariableWrite};
use serde_json::{Value, json};

use super::answer::AnswerRoom;
use super::hello::WireFeatures;
use super::main_channel::{Dialect, DialectCell, MainChannel, MainConfig, MainReply};
use super::rows::MaskType;
use super::scripted::{Line, Scripted, VOCABULARY, World, config};
use super::sequence::{Capabilities, MidReturned, Returned, ReturnedBranch, ReturnedSplice};
use crate::fuzz::Choices;
use crate::host::{Group, VariablesLimits, Waiting};

/// Runs `bytes` as a list of operations of an engine and of controllers.
///
/// # Panics
/// If an invariant does not hold.
pub fn messages(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let Some(mut play) = Play::new(&mut choices) else {
        return;
    };
    while let Some(op) = choices.next_byte() {
        if !play.operate(op, &mut choices) {
            break;
        }
    }
    play.end();
}

/// A main channel, and what is known about it.
struct Play {
    world: World,
    channel: MainChannel<Scripted>,
    room: AnswerRoom,
    group: Arc<Group>,
    /// Instances that were offered.
    instances: u32,
    requests: u32,
}

impl Play {
    fn new(choices: &mut Choices<'_>) -> Option<Self> {
        let setup = choices.byte();
        let dialects = [Dialect::Auto, Dialect::P1, Dialect::P1i, Dialect::P2];
        let types = [MaskType::F32, MaskType::F16, MaskType::Bf16, MaskType::Bool];
        let mask_bytes = [1 << 16, 400, 4 * VOCABULARY * 4, 4096 + 400, 8][choices.below(5)];
        let rooms = [60_000, 400, 1_500, 8_000];
        let bytes_max = rooms[usize::from(setup >> 6)];
        let mut steps = config();
        steps.forks = 5;
        steps.late_steps = 3;
        steps.late_mid_skips = choices.flag();
        let world = World::with_masks(mask_bytes);
        let config = MainConfig {
            steps,
            capabilities: Capabilities {
                fork: !choices.flag(),
                backtrack: true,
                ff_tokens: true,
                logits: false,
            },
            mask_type: types[usize::from(setup >> 2) % 4],
            logits: [0, VOCABULARY, VOCABULARY + 28][choices.below(3)],
            p2_step_time: Duration::from_millis(25),
        };
        let agreed = (
            DialectCell::new(dialects[usize::from(setup) % 4]),
            WireFeatures::new(),
        );
        let pending = Arc::clone(&world.pending);
        let channel = MainChannel::new(config, agreed, pending, world.masks_again()).ok()?;
        Some(Self {
            world,
            channel,
            room: AnswerRoom {
                bytes_max,
                room: bytes_max + 4,
            },
            group: Group::new(64, VariablesLimits::default()),
            instances: 0,
            requests: 0,
        })
    }

    /// Returns whether the engine goes on.
    fn operate(&mut self, op: u8, choices: &mut Choices<'_>) -> bool {
        match op % 16 {
            0..=2 => self.offer(choices),
            3..=5 => {
                let request = self.post_pre(choices);
                self.ask(&request);
            }
            6 | 7 => {
                let request = self.mid(choices);
                self.ask(&request);
            }
            8..=10 => {
                let request = self.process(choices);
                self.ask(&request);
            }
            11 => {
                let features = ["bitmask", "compact", "wait", "x"];
                let features = &features[choices.below(4)..];
                self.ask(&json!({"op": "hello", "features": features}));
            }
            12 => {
                let op = ["ping", "tokens", "dance"][choices.below(3)];
                self.ask(&json!({"op": op, "$rid": choices.byte().to_string()}));
            }
            13 => return self.send(choices.bytes()).is_some(),
            14 => {
                // The members of an op as the bytes say.
                let op = ["mid_process", "post_pre_process", "hello"][choices.below(3)];
                let members = String::from_utf8_lossy(choices.bytes());
                let text = format!("{{\"op\":\"{op}\",{members}}}");
                return self.send(text.as_bytes()).is_some();
            }
            _ => self
                .world
                .clock
                .advance(Duration::from_millis(choices.byte().into())),
        }
        true
    }

    /// An instance that waits to be bound.
    fn offer(&mut self, choices: &mut Choices<'_>) {
        let lines: Vec<Line> = (0..choices.below(6) + 1)
            .map(|_| self.line(choices))
            .collect();
        let mut sequence = Scripted::new(&self.world, lines).again_and_again();
        if choices.flag() {
            sequence = sequence.printing(&"\"log\n".repeat(choices.below(200)));
        }
        if choices.below(4) == 1 {
            let write = |number: usize| VariableWrite {
                name: format!("v{}", number % 3),
                value: vec![0xab; 20],
                append: number.is_multiple_of(2),
                when_version_is: None,
            };
            sequence = sequence.writing((0..choices.below(30)).map(write).collect());
        }
        let request = format!("r{}", self.instances);
        self.instances += 1;
        let now = self.world.step().arrival;
        if let Ok(reserved) = self.world.pending.reserve(&request, now) {
            reserved.ready(sequence, now);
        }
    }

    fn line(&self, choices: &mut Choices<'_>) -> Line {
        match choices.below(12) {
            0 => Line::Fails("boom"),
            1 => Line::At(u64::from(choices.byte()) * 8, self.returned(choices)),
            _ => Line::Returns(self.returned(choices)),
        }
    }

    /// What the host or the message of a controller's process lets through, also of another callback than the one that was
    /// called.
    fn returned(&self, choices: &mut Choices<'_>) -> Returned {
        match choices.below(9) {
            0 | 1 => Returned::Pre {
                num_forks: 1,
                suspend: false,
                ff_tokens: tokens(choices),
                wait: None,
            },
            2 => Returned::Pre {
                num_forks: choices.below(7) as u32,
                suspend: choices.below(4) == 1,
                ff_tokens: if choices.below(4) == 1 {
                    tokens(choices)
                } else {
                    Vec::new()
                },
                wait: None,
            },
            3 => Returned::Pre {
                num_forks: 1,
                suspend: true,
                ff_tokens: Vec::new(),
                wait: self.wait(choices),
            },
            4 => Returned::Mid(match choices.below(3) {
                0 => MidReturned::Stop,
                1 => MidReturned::Sample(mask(choices)),
                _ => MidReturned::Splice {
                    backtrack: 1 + u32::from(choices.byte()),
                    ff_tokens: tokens(choices),
                },
            }),
            5 => Returned::Post {
                stop: choices.flag(),
            },
            6 => Returned::Begun { prompt: None },
            _ => {
                let number = choices.below(6);
                let branches = (0..number).map(|_| self.branch(choices));
                Returned::Branches(branches.collect())
            }
        }
    }

    fn branch(&self, choices: &mut Choices<'_>) -> ReturnedBranch {
        let splices = [1, 1, 0, 2][choices.below(4)];
        let splice = |_| ReturnedSplice {
            when_sampled: tokens(choices),
            backtrack: choices.below(4) as u32,
            ff_tokens: tokens(choices),
        };
        ReturnedBranch {
            splices: (0..splices).map(splice).collect(),
            mask: mask(choices),
            temperature: choices.flag().then_some(0.5),
            wait: self.wait(choices),
        }
    }

    fn wait(&self, choices: &mut Choices<'_>) -> Option<Waiting> {
        let waits = choices.flag();
        waits.then(|| Waiting::of_test(&self.group, &["a", "b"]))
    }

    /// The request of an instance, which may have been bound before, or never offered.
    fn req_id(&self, choices: &mut Choices<'_>) -> String {
        let number = self.instances as usize + 1;
        format!("r{}", choices.below(number.min(256)))
    }

    fn post_pre(&self, choices: &mut Choices<'_>) -> Value {
        let post = |choices: &mut Choices<'_>| json!({"id": id(choices), "tokens": tokens(choices), "backtrack": choices.below(3)});
        let pre =
            |choices: &mut Choices<'_>| json!({"id": id(choices), "req_id": self.req_id(choices)});
        json!({
            "op": "post_pre_process",
            "post_ops": list(choices, 4, post),
            "pre_ops": list(choices, 3, pre),
            "freed": list(choices, 2, |choices| json!(id(choices))),
        })
    }

    fn mid(&self, choices: &mut Choices<'_>) -> Value {
        let op = |choices: &mut Choices<'_>| {
            let mut op = json!({"id": id(choices)});
            if choices.below(3) == 1 {
                op["clone_id"] = json!(id(choices));
            }
            op
        };
        json!({"op": "mid_process", "ops": list(choices, 6, op)})
    }

    fn process(&self, choices: &mut Choices<'_>) -> Value {
        let op = |choices: &mut Choices<'_>| {
            let mut op = json!({"id": id(choices), "sampled": null, "backtrack": 0});
            op["tokens"] = json!(tokens(choices));
            match choices.below(6) {
                1 => op["req_id"] = json!(self.req_id(choices)),
                2 => {
                    op["clone_id"] = json!(id(choices));
                    op["clone_idx"] = json!(choices.below(5));
                }
                3 => op["backtrack"] = json!(choices.byte()),
                4 => op["sampled"] = json!(choices.byte()),
                5 => op["clone_id"] = json!(id(choices)),
                _ => {}
            }
            op
        };
        json!({
            "op": "mid_process",
            "ops": list(choices, 6, op),
            "freed": list(choices, 2, |choices| json!(id(choices))),
        })
    }

    /// Sends a request and checks its answer.
    fn ask(&mut self, request: &Value) {
        self.requests += 1;
        let mut request = request.clone();
        let rid = self.requests.to_string();
        request["$rid"] = json!(rid);
        let Some(answer) = self.send(request.to_string().as_bytes()) else {
            panic!("only `stop` has no answer");
        };
        assert_eq!(answer["$rid"], json!(rid));
        let data = &answer["data"];
        if let Some(seqs) = data["seqs"].as_object() {
            let ops = request["ops"].as_array().map_or(&[][..], Vec::as_slice);
            let ids: BTreeSet<String> = ops.iter().map(|op| op["id"].to_string()).collect();
            assert_eq!(ids, seqs.keys().cloned().collect());
            if data["num_masks"].is_number() {
                self.check_rows(data);
            } else {
                assert_eq!(data["num_seqs"], json!(ops.len()));
            }
        }
    }

    /// Checks that the masks of a P2 answer are inside of the region.
    fn check_rows(&self, data: &Value) {
        let number = |name: &str| data[name].as_u64().expect("a number");
        let masks = number("num_masks");
        let end = number("first_mask_byte_offset") + masks * number("mask_num_bytes");
        assert!(end <= self.world.masks.bytes() as u64, "{data}");
        let seqs = data["seqs"].as_object().expect("results");
        let branches = seqs
            .values()
            .filter_map(|seq| seq["result"]["branches"].as_array());
        for branch in branches.flatten() {
            if let Some(mask) = branch["sample_mask"].as_u64() {
                assert!(mask < masks, "{data}");
            }
        }
    }

    /// Sends a message and returns the answer; `None`: it was `stop`.
    fn send(&mut self, message: &[u8]) -> Option<Value> {
        let step = self.world.step();
        let answer = match self.channel.handle(message, self.room, step) {
            MainReply::Answer(answer) => answer,
            MainReply::Stop => return None,
        };
        let read: Value = serde_json::from_slice(&answer).expect("JSON");
        match read["type"].as_str() {
            Some("ok") => {
                let data = &read["data"];
                let is_step = data["seqs"].is_object() || data["pre_seqs"].is_object();
                assert!(!is_step || answer.len() <= self.room.bytes_max, "{read}");
            }
            Some("error") => {
                assert!(read["error"].is_string() && read["is_user_error"].is_boolean())
            }
            Some("json-error") => assert!(read["error"].is_string()),
            _ => panic!("{read}"),
        }
        Some(read)
    }

    fn end(mut self) {
        let pong = self.send(br#"{"op":"ping"}"#);
        assert_eq!(
            pong.map(|pong| pong["data"]["pong"].clone()),
            Some(json!(1))
        );
        drop(self.channel);
        let (instances, sequences) = self.world.pending.counts();
        assert_eq!(instances, sequences, "a sequence is counted that is gone");
    }
}

fn list(
    choices: &mut Choices<'_>,
    most: usize,
    mut item: impl FnMut(&mut Choices<'_>) -> Value,
) -> Vec<Value> {
    let number = choices.below(most + 1);
    (0..number).map(|_| item(choices)).collect()
}

/// Few ids, so that they meet, and the largest one.
fn id(choices: &mut Choices<'_>) -> u64 {
    match choices.byte() {
        255 => (1 << 53) - 1,
        byte => u64::from(byte % 8),
    }
}

fn tokens(choices: &mut Choices<'_>) -> Vec<Token> {
    let number = choices.below(4);
    (0..number)
        .map(|_| choices.below(VOCABULARY) as Token)
        .collect()
}

fn mask(choices: &mut Choices<'_>) -> Option<Arc<Mask>> {
    match choices.below(4) {
        0 => None,
        1 => Some(Arc::new(Mask::all(VOCABULARY))),
        2 => Some(Arc::new(Mask::none(VOCABULARY))),
        _ => {
            let mut mask = Mask::none(VOCABULARY);
            mask.allow(choices.below(VOCABULARY) as Token);
            Some(Arc::new(mask))
        }
    }
}
