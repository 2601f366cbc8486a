//! D-48: equal text with a cold and a warm cache, for each kind of model, with both KV cache layouts.

use super::*;
use crate::api::{EngineEvent, EventKind, GenerationRequest, Prompt};
use crate::{Config, DraftModel, Engine, EngineOwner};

/// A model and its engine, stepped by hand.
pub(super) struct Bench {
    pub(super) owner: EngineOwner,
    pub(super) engine: Engine,
    /// Of its answers and those of a cold cache.
    pub(super) equality: Equality,
}

/// How equal two answers to the same request are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Equality {
    /// Tokens and log-probabilities have the same bits.
    Bits,
    /// Log-probabilities are as near as this, and where two tokens are that near to each other, either may come.
    Within(f32),
}

/// What the kernels round differently, depending on what else is computed.
const ROUNDING: f32 = 0.02;

impl Equality {
    /// What the facts of the model promise.
    fn of(model: &Embedded) -> Self {
        match model.info().deterministic {
            Some(true) => Self::Bits,
            _ => Self::Within(ROUNDING),
        }
    }
}

impl Bench {
    fn new(shape: &RandomModelShape, options: &LoadOptions) -> Self {
        Self::with(shape, options, Config::default())
    }

    pub(super) fn with(shape: &RandomModelShape, options: &LoadOptions, config: Config) -> Self {
        let bytes: &'static [u8] = written(shape).leak();
        let model = load("m", &ModelSource::Bytes(bytes), options, &mut |_| true).unwrap();
        Self::of(model, config)
    }

    /// An engine of a model, and of the draft model that was loaded with it: a random one is never sure.
    pub(super) fn of(mut model: Embedded, config: Config) -> Self {
        // What a token takes is then never known, as nothing is measured of an owner that is stepped by hand, and what is planned does
        // not depend on the machine: a prefix is read from a disk however long that takes.
        model.warm_times = None;
        let equality = Equality::of(&model);
        let draft = model.take_draft().map(Box::new);
        let draft = draft.map(|draft| DraftModel::new(draft, &model, 0.0).unwrap());
        let config = Config {
            prefix_tokens_min: 1,
            seed: Some(1),
            ..config
        };
        let (owner, engine) = Engine::by_hand_drafting(Box::new(model), draft, config);
        Self {
            owner,
            engine,
            equality,
        }
    }

    /// Returns the choices of these requests, which run together.
    pub(super) fn answers(&mut self, requests: Vec<GenerationRequest>) -> Vec<Answer> {
        let submit = |request| self.engine.submit(request).unwrap();
        let mut handles: Vec<_> = requests.into_iter().map(submit).collect();
        self.owner.step(Time::ZERO);
        while !self.owner.is_empty() {
            self.owner.step(Time::ZERO);
        }
        let events = |handle: &mut crate::RequestHandle| {
            let mut answer = Answer::default();
            while let Some(event) = handle.try_next() {
                answer.take(event);
            }
            answer
        };
        handles.iter_mut().map(events).collect()
    }
}

/// Tokens and their log-probabilities, by choice, and the number of cached prompt tokens.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) choices: Vec<Vec<(Token, f32)>>,
    /// Of each choice.
    texts: Vec<String>,
    pub(super) cached: u32,
}

impl Answer {
    /// An answer of one choice.
    pub(super) fn of(choice: Vec<(Token, f32)>) -> Self {
        Self {
            choices: vec![choice],
            ..Self::default()
        }
    }

    fn take(&mut self, event: EngineEvent) {
        let choice = event.choice as usize;
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, Vec::new());
            self.texts.resize(choice + 1, String::new());
        }
        match event.kind {
            EventKind::Tokens(tokens) => {
                let received = tokens.tokens.iter().map(|token| (token.id, token.logprob));
                let left = self.choices[choice].len() - tokens.backtrack as usize;
                self.choices[choice].truncate(left);
                self.choices[choice].extend(received);
                let text = &mut self.texts[choice];
                text.truncate(text.len() - tokens.withdrawn as usize);
                text.push_str(&tokens.text);
            }
            EventKind::Usage(usage) => self.cached = usage.cached_tokens,
            EventKind::Finish(_) | EventKind::Report(_) => {}
            EventKind::Failed(error) | EventKind::Error(error) => panic!("{error:?}"),
        }
    }

    pub(super) fn assert_as(&self, cold: &Self, equality: Equality, what: &str) {
        assert_eq!(self.choices.len(), cold.choices.len(), "{what}");
        match equality {
            Equality::Bits => self.assert_equal(cold, what),
            Equality::Within(rounding) => self.assert_near(cold, rounding, what),
        }
    }

    fn assert_equal(&self, cold: &Self, what: &str) {
        for (warm, cold) in self.choices.iter().zip(&cold.choices) {
            let bits = |&(token, logprob): &(Token, f32)| (token, logprob.to_bits());
            let differs = (warm.iter().map(bits).zip(cold.iter().map(bits)))
                .position(|(warm, cold)| warm != cold);
            if let Some(at) = differs {
                panic!("{what}: token {at}: {:?} for {:?}", warm[at], cold[at]);
            }
            assert_eq!(warm.len(), cold.len(), "{what}");
        }
        // A part of an answer has none.
        if !self.texts.is_empty() {
            assert_eq!(self.texts, cold.texts, "{what}");
        }
    }

    fn assert_near(&self, cold: &Self, rounding: f32, what: &str) {
        for (warm, cold) in self.choices.iter().zip(&cold.choices) {
            for (at, (warm, cold)) in warm.iter().zip(cold).enumerate() {
                let far = (warm.1 - cold.1).abs();
                assert!(far < rounding, "{what}: token {at}: {warm:?} for {cold:?}");
                if warm.0 != cold.0 {
                    // A tie: the text differs from here on.
                    break;
                }
            }
        }
    }
}

/// A scoring request, so that the same tokens are compared whatever would have been generated.
fn scored(prompt: &[Token], output: &[Token]) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt.to_vec()));
    request.scored = Some(output.to_vec());
    request.params.top_logprobs = Some(0);
    request
}

pub(super) fn generated(prompt: &[Token], tokens: u32, n: u32) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt.to_vec()));
    request.params.temperature = Some(0.0);
    (request.params.max_tokens, request.params.n) = (Some(tokens), Some(n));
    request.params.ignore_eos = Some(true);
    request.params.top_logprobs = Some(0);
    request
}

/// A text without repetitions.
pub(super) fn text(seed: u32, tokens: u32) -> Vec<Token> {
    (0..tokens)
        .map(|at| (at * at * 7 + at * seed * 13 + seed * 31) % 250)
        .collect()
}

/// Requests that resume from prefixes of others, near their ends and far from them, with other requests between that
/// reuse the cells which sliding-window layers have freed.
fn rounds() -> Vec<Vec<(Vec<Token>, u32, u32)>> {
    let cut = |seed, tokens, more: u32| [text(seed, tokens), text(more, 9)].concat();
    vec![
        vec![(text(1, 150), 40, 1)],
        vec![
            (text(2, 200), 20, 1),
            (text(3, 130), 30, 1),
            (text(4, 90), 50, 1),
        ],
        // Back into the first, by few and by many tokens.
        vec![(cut(1, 145, 5), 20, 1)],
        vec![(cut(1, 100, 6), 20, 1), (cut(2, 60, 7), 20, 1)],
        vec![
            (text(8, 220), 10, 1),
            (text(9, 220), 10, 1),
            (text(10, 220), 10, 1),
        ],
        // Forks: choices share a prompt, and diverge.
        vec![(cut(1, 149, 11), 60, 3)],
        vec![(cut(1, 40, 12), 60, 2), (text(13, 200), 30, 1)],
        vec![(cut(13, 190, 14), 20, 1), (cut(3, 120, 15), 20, 1)],
        vec![(cut(2, 199, 16), 20, 1), (cut(10, 219, 17), 20, 2)],
    ]
}

/// A kind of model, and how its KV cache is laid out.
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) shape: RandomModelShape,
    swa_full: Option<bool>,
}

impl Kind {
    /// Whether each layer attends to all tokens before, so that any part of a prefix can be restored.
    pub(super) fn attends_to_all(&self) -> bool {
        !matches!(self.shape.architecture, "gemma3" | "lfm2" | "mamba")
    }

    /// The options of a test with those of this kind.
    pub(super) fn options(&self, options: &LoadOptions) -> LoadOptions {
        LoadOptions {
            llama: LlamaOptions {
                swa_full: self.swa_full,
                ..options.llama.clone()
            },
            ..options.clone()
        }
    }
}

pub(super) fn kinds() -> [Kind; 8] {
    let of = |name, shape, swa_full| Kind {
        name,
        shape,
        swa_full,
    };
    let wide = RandomModelShape {
        sliding_window: 40,
        ..RandomModelShape::tiny_windowed()
    };
    [
        of("full attention", RandomModelShape::tiny(), None),
        of("sliding window", RandomModelShape::tiny_windowed(), None),
        of("wide sliding window", wide.clone(), Some(false)),
        of("sliding window in a full cache", wide, Some(true)),
        of("recurrent", RandomModelShape::tiny_recurrent(), None),
        of("hybrid", RandomModelShape::tiny_hybrid(), None),
        of("experts", RandomModelShape::tiny_experts(), None),
        of(
            "SentencePiece",
            RandomModelShape::tiny_sentence_piece(),
            None,
        ),
    ]
}

/// Answers of engines that have computed nothing else, each computed once: they are the same for all layouts.
struct ColdAnswers<'a> {
    of: &'a Kind,
    /// With the requests that they answer.
    known: Vec<(String, Answer)>,
}

impl<'a> ColdAnswers<'a> {
    fn new(of: &'a Kind) -> Self {
        let known = Vec::new();
        Self { of, known }
    }

    fn of(&mut self, request: GenerationRequest) -> &Answer {
        let Prompt::Tokens(prompt) = &request.prompt else {
            unreachable!("these requests have tokens")
        };
        let params = &request.params;
        let (tokens, n) = (params.max_tokens, params.n);
        let key = format!("{prompt:?} {:?} {tokens:?} {n:?}", request.scored);
        let known = self.known.iter().position(|(known, _)| *known == key);
        let at = known.unwrap_or_else(|| {
            let mut engine = Bench::new(&self.of.shape, &self.of.options(&options()));
            let answer = engine.answers(vec![request]).remove(0);
            self.known.push((key, answer));
            self.known.len() - 1
        });
        &self.known[at].1
    }
}

#[test]
fn d_48_a_warm_and_a_cold_cache_give_equal_text() {
    for of in kinds() {
        let kind = of.name;
        let mut cold = ColdAnswers::new(&of);
        // The last one keeps next to nothing in KV cells, so that what is reused was restored.
        for (cache_tokens, kept_prefixes) in [(None, 4), (Some(1024), 4), (Some(1024), 0)] {
            let options = LoadOptions {
                cache_tokens,
                kept_prefixes: Some(kept_prefixes),
                ..of.options(&options())
            };
            let mut warm = Bench::new(&of.shape, &options);
            let mut cached = 0;
            for (index, round) in rounds().into_iter().enumerate() {
                let requests = round
                    .iter()
                    .map(|(prompt, tokens, n)| generated(prompt, *tokens, *n));
                let answers = warm.answers(requests.collect());
                let what = format!("{kind}, cache {cache_tokens:?} {kept_prefixes}, round {index}");
                for (answer, (prompt, tokens, n)) in answers.iter().zip(&round) {
                    let alone = cold.of(generated(prompt, *tokens, *n));
                    answer.assert_as(alone, warm.equality, &what);
                    assert_eq!(alone.cached, 0);
                    cached += answer.cached;
                }
                // The conversation continues; the scores of other answers are compared too.
                let reply = answers[0].choices[0].iter().map(|received| received.0);
                let prompt: Vec<Token> = round[0]
                    .0
                    .iter()
                    .copied()
                    .chain(reply)
                    .chain([9; 5])
                    .collect();
                let next = warm.answers(vec![generated(&prompt, 9, 1)]).remove(0);
                next.assert_as(
                    cold.of(generated(&prompt, 9, 1)),
                    warm.equality,
                    &format!("{what}, next turn"),
                );
                cached += next.cached;
                let given = text(20, 12);
                let other = warm.answers(vec![scored(&round[0].0, &given)]).remove(0);
                other.assert_as(
                    cold.of(scored(&round[0].0, &given)),
                    warm.equality,
                    &format!("{what}, scored"),
                );
            }
            // Other kinds restore whole prefixes alone, which these rounds find in their slots.
            if kept_prefixes == 0 && cache_tokens.is_some() && of.attends_to_all() {
                let restored = warm.engine.stats().prefix_restored.get();
                assert!(restored > 50, "{kind}: {restored} restored");
            }
            // Only prefixes that the model can resume from are used.
            assert!(
                cached > 100,
                "{kind}, cache {cache_tokens:?} {kept_prefixes}: {cached} reused"
            );
        }
    }
}

/// Cells before a window are reused as soon as other slots need them.
#[test]
fn d_48_a_sliding_window_slot_cannot_resume_before_its_window() {
    let few = LoadOptions {
        context_tokens: Some(512),
        cache_tokens: Some(512),
        ..options()
    };
    let shape = RandomModelShape {
        sliding_window: 32,
        ..RandomModelShape::tiny_windowed()
    };
    let bytes: &'static [u8] = written(&shape).leak();
    let mut model = load("m", &ModelSource::Bytes(bytes), &few, &mut |_| true).unwrap();
    let fill = |model: &mut Embedded, slot, from: u32, tokens: &[Token]| {
        for (index, part) in tokens.chunks(50).enumerate() {
            let at = from + 50 * index as u32;
            model.decode(&entries(slot, at, part), Time::ZERO).unwrap();
        }
    };
    for (slot, tokens) in [(0, 150), (1, 100), (2, 150)] {
        model.open(slot, &opening());
        fill(&mut model, slot, 0, &text(slot, tokens));
    }
    let back = |model: &Embedded| [150, 41, 40, 20, 0].map(|tokens| model.can_resume(2, tokens));
    assert_eq!(back(&model), [true; 5], "no other slot needs its cells");
    // More tokens than the gap that the other slot leaves: sliding-window layers reuse the cells behind the window.
    model.release(1);
    model.open(3, &opening());
    fill(&mut model, 3, 0, &text(3, 110));
    assert_eq!(back(&model), [true, true, false, false, true]);
    assert!(model.can_resume(0, 20), "that of another slot is there");
    assert!(!model.can_resume(2, 151) && !model.can_resume(99, 0));
    // A slot that reports that it can resume gives correct rows.
    model.open(1, &opening());
    model.fork(2, 1, 41);
    let next = row(&mut model, &entries(1, 41, &[7]));
    let mut fresh = load("m", &ModelSource::Bytes(bytes), &few, &mut |_| true).unwrap();
    fresh.open(0, &opening());
    fill(&mut fresh, 0, 0, &text(2, 41));
    alike(&row(&mut fresh, &entries(0, 41, &[7])), &next);
}

/// A slot that was saved, and filled again after others had used its cells, is the same as one that never lost them.
#[test]
fn d_48_a_restored_slot_gives_the_rows_of_the_saved_one() {
    for of in kinds() {
        let kind = of.name;
        for cache_tokens in [None, Some(1024)] {
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let bytes: &'static [u8] = written(&of.shape).leak();
            let source = ModelSource::Bytes(bytes);
            let mut model = load("m", &source, &options, &mut |_| true).unwrap();
            let fill = |model: &mut Embedded, slot, seed, tokens| {
                model.open(slot, &opening());
                let prompt = text(seed, tokens);
                for (index, part) in prompt.chunks(40).enumerate() {
                    let batch = entries(slot, 40 * index as u32, part);
                    model.decode(&batch, Time::ZERO).unwrap();
                }
            };
            fill(&mut model, 0, 1, 150);
            let state = model.save(0).unwrap();
            let expected = row(&mut model, &entries(0, 150, &[7]));
            model.release(0);
            fill(&mut model, 1, 2, 100);
            fill(&mut model, 0, 3, 20);
            model.release(0);
            model.open(0, &opening());
            assert!(model.restore(0, &state, 150), "{kind} {cache_tokens:?}");
            let restored = row(&mut model, &entries(0, 150, &[7]));
            let pairs = expected.iter().zip(&restored);
            let far = pairs.map(|(before, after)| (before - after).abs());
            let far = far.fold(0.0, f32::max);
            assert!(far < 1e-4, "{kind} {cache_tokens:?}: {far}");
            // What is no saved state leaves an empty slot that can be used.
            model.release(0);
            for broken in [
                &state[..0],
                &state[..9],
                &state[..state.len() / 2],
                &state[..state.len() - 1],
            ] {
                model.open(0, &opening());
                assert!(!model.restore(0, broken, 150), "{kind} {}", broken.len());
                assert!(!model.restore(0, &state, 151), "another number of tokens");
                fill(&mut model, 0, 1, 150);
                model.release(0);
            }
        }
    }
}

/// With cells of its own for each slot, llama.cpp's own copy is not made before the next decode call, from and to whatever the
/// two slots hold then.
#[test]
fn d_48_a_copy_is_complete_before_its_slots_are_used_for_something_else() {
    let bytes: &'static [u8] = written(&RandomModelShape::tiny()).leak();
    let source = ModelSource::Bytes(bytes);
    let windowed: &'static [u8] = written(&RandomModelShape::tiny_windowed()).leak();
    let full = LoadOptions {
        llama: LlamaOptions {
            swa_full: Some(true),
            ..batches(64)
        },
        ..options()
    };
    let mut model = load("m", &ModelSource::Bytes(windowed), &full, &mut |_| true).unwrap();
    model.open(0, &opening());
    model
        .decode(&entries(0, 0, &text(1, 40)), Time::ZERO)
        .unwrap();
    let state = model.save(0).unwrap();
    model.open(1, &opening());
    model.fork(0, 1, 40);
    model.release(0);
    model.open(0, &opening());
    let refused = [model.save(1).is_none(), !model.restore(0, &state, 40)];
    assert_eq!(refused, [true; 2], "a state with a window is copied later");
    model.decode(&entries(1, 40, &[7]), Time::ZERO).unwrap();
    assert!(model.save(1).is_some() && model.restore(0, &state, 40));
    for cache_tokens in [None, Some(1024)] {
        let options = LoadOptions {
            cache_tokens,
            ..options()
        };
        let loaded = || load("m", &source, &options, &mut |_| true).unwrap();
        let mut model = loaded();
        let fill = |model: &mut Embedded, slot, seed| {
            model.open(slot, &opening());
            model
                .decode(&entries(slot, 0, &text(seed, 40)), Time::ZERO)
                .unwrap();
        };
        let cold = [1, 2].map(|seed| {
            let mut model = loaded();
            fill(&mut model, 0, seed);
            row(&mut model, &entries(0, 40, &[7]))
        });
        fill(&mut model, 0, 2);
        let second = model.save(0).unwrap();
        model.release(0);
        fill(&mut model, 0, 1);
        // A copy whose source, and one whose target, is filled with something else before a decode call.
        for slot in [1, 2] {
            model.open(slot, &opening());
            model.fork(0, slot, 40);
        }
        let copied = model.save(1).unwrap();
        for slot in [0, 2] {
            model.release(slot);
            model.open(slot, &opening());
            assert!(model.restore(slot, &second, 40));
        }
        for (slot, of) in [(1, 0), (0, 1), (2, 1)] {
            alike(&cold[of], &row(&mut model, &entries(slot, 40, &[7])));
        }
        model.release(1);
        model.open(1, &opening());
        assert!(model.restore(1, &copied, 40));
        alike(&cold[0], &row(&mut model, &entries(1, 40, &[7])));
    }
}

/// Decodes tokens of a slot from a position on, some at a time.
fn fill(model: &mut Embedded, slot: SlotId, from: u32, tokens: &[Token]) {
    for (index, part) in tokens.chunks(40).enumerate() {
        let batch = entries(slot, from + 40 * index as u32, part);
        model.decode(&batch, Time::ZERO).unwrap();
    }
}

/// A slot returns to where a checkpoint was made of another one with the same tokens, which goes on as if nothing were.
#[test]
fn d_48_a_copy_is_rewound_to_a_checkpoint() {
    for of in kinds() {
        for cache_tokens in [None, Some(1024)] {
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let bytes: &'static [u8] = written(&of.shape).leak();
            let loaded = || {
                let source = ModelSource::Bytes(bytes);
                load("m", &source, &options, &mut |_| true).unwrap()
            };
            if loaded().checkpoint_terms().is_some() {
                rewind_copies(&of, &loaded);
            } else {
                let whole = of.attends_to_all() || of.swa_full == Some(true);
                assert!(whole, "{}", of.name);
            }
        }
    }
}

fn rewind_copies(of: &Kind, loaded: &dyn Fn() -> Embedded) {
    let kind = of.name;
    let prompt = text(1, 200);
    let cold = |tokens: usize| {
        let mut model = loaded();
        model.open(0, &opening());
        fill(&mut model, 0, 0, &prompt[..tokens]);
        row(&mut model, &entries(0, tokens as u32, &[7]))
    };
    let mut model = loaded();
    let slack = model.checkpoint_terms().unwrap().slack;
    let is_recurrent = matches!(kind, "recurrent" | "hybrid");
    assert_eq!(slack == 0, is_recurrent, "{kind}");
    model.open(0, &opening());
    fill(&mut model, 0, 0, &prompt[..100]);
    let size = model.checkpoint_size(0);
    let checkpoint = model.checkpoint(0).unwrap();
    assert_eq!(checkpoint.len(), size);
    // A recurrent model has nothing else.
    let is_part = size < model.saved_size(0);
    assert_eq!(is_part, kind != "recurrent", "{kind}: {size}");
    fill(&mut model, 0, 100, &prompt[100..]);
    // Others need the cells that the windows have left.
    for slot in 1..4 {
        model.open(slot, &opening());
        fill(&mut model, slot, 0, &text(slot, 60));
    }
    let tokens = 100 - slack;
    for _ in 0..3 {
        model.release(2);
        model.open(2, &opening());
        model.fork(0, 2, 200);
        assert!(model.rewind(2, &checkpoint, 100), "{kind}");
        assert!(model.can_resume(2, tokens), "{kind}");
        model.truncate(2, tokens);
        let rewound = row(&mut model, &entries(2, tokens, &[7]));
        alike(&cold(tokens as usize), &rewound);
    }
    // What is no checkpoint leaves a slot that can be used again. Then in place.
    assert!(!model.rewind(2, &checkpoint[..size / 2], 90), "{kind}");
    model.release(2);
    model.open(2, &opening());
    fill(&mut model, 2, 0, &prompt[..120]);
    assert!(model.rewind(2, &checkpoint, 100), "{kind}");
    alike(&cold(100), &row(&mut model, &entries(2, 100, &[7])));
    alike(&cold(200), &row(&mut model, &entries(0, 200, &[7])));
}

/// What is asked again, or goes on from an earlier answer, computes its new tokens alone, in KV cells and restored.
#[test]
fn d_48_regenerated_and_edited_answers_compute_few_tokens() {
    for of in kinds() {
        for (cache_tokens, kept_prefixes) in [(None, 4), (Some(1024), 4), (Some(1024), 0)] {
            let options = LoadOptions {
                cache_tokens,
                kept_prefixes: Some(kept_prefixes),
                ..of.options(&options())
            };
            let mut warm = Bench::new(&of.shape, &options);
            let what = format!("{}, cache {cache_tokens:?} {kept_prefixes}", of.name);
            let mut ask = |prompt: &[Token], step: &str| {
                let what = format!("{what}, {step}");
                let answer = warm.answers(vec![generated(prompt, 60, 1)]).remove(0);
                let mut cold = Bench::new(&of.shape, &options);
                let cold = cold.answers(vec![generated(prompt, 60, 1)]).remove(0);
                answer.assert_as(&cold, warm.equality, &what);
                let reply: Vec<Token> = answer.choices[0].iter().map(|token| token.0).collect();
                let computed = prompt.len() as u32 - answer.cached;
                // Another conversation in between.
                warm.answers(vec![generated(&text(computed + 40, 100), 30, 2)]);
                (reply, computed)
            };
            let prompt = text(1, 200);
            let (reply, computed) = ask(&prompt, "first");
            assert_eq!(computed, 200, "{what}");
            // A cache that is full by layout may have lost the window.
            let full = of.name == "sliding window in a full cache";
            let (_, computed) = ask(&prompt, "regenerated");
            assert!(computed == 1 || full, "{what}: {computed} computed");
            let turn = |seed| [&prompt[..], &reply, &text(seed, 20)].concat();
            let (_, computed) = ask(&turn(5), "second turn");
            // The last token of the reply was never computed.
            assert!(computed == 21 || full, "{what}: {computed} computed");
            let (_, computed) = ask(&turn(6), "edited turn");
            assert!(computed <= 21 || full, "{what}: {computed} computed");
            let (_, computed) = ask(&prompt, "regenerated after a turn");
            assert!(computed == 1 || full, "{what}: {computed} computed");
        }
    }
}
