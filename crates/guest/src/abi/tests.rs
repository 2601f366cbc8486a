//! Both forms, over JSON as a host sees them: each must give what the controller gives natively.

use std::sync::Arc;

use super::{p1, p2};
use crate::constraint::{ByteClass, Pattern};
use crate::json::Json;
use crate::native::{SharedVariables, host};
use crate::testing::{End, Run, Scenario, Steered, ToyModel};
use crate::{
    Branch, ConditionalSplice, Controller, Decision, Init, Mask, Matcher, Sample, Step, Token,
    Vars, tokenize,
};

/// A form, driven by the engine of the tests.
struct Module<M> {
    machine: M,
    context: host::Context,
    /// P1: the callback that the next step begins with.
    resume: Resume,
}

#[derive(Clone, Copy, PartialEq)]
enum Resume {
    Post,
    /// The tokens of the splice that was answered were given to `post` already.
    Pre,
    Mid,
}

impl<M: Clone> Module<M> {
    fn new(scenario: &Scenario, variables: &Arc<SharedVariables>, make: fn() -> M) -> Self {
        let argument: Arc<str> = scenario.argument_text().into();
        let mut context = host::Context::new(
            Arc::new(ToyModel::new()),
            argument,
            Arc::clone(variables) as _,
        );
        Self {
            machine: host::enter(&mut context, make),
            context,
            resume: Resume::Pre,
        }
    }

    fn call(&mut self, callback: fn(&mut M, &[u8]) -> String, argument: &str) -> Json {
        let json = host::enter(&mut self.context, || {
            callback(&mut self.machine, argument.as_bytes())
        });
        Json::parse(&json).unwrap()
    }

    fn mask(&mut self, handle: u32) -> Mask {
        host::enter(&mut self.context, || host::returned_mask(handle))
    }

    fn copy(&self) -> Self {
        Self {
            machine: self.machine.clone(),
            context: self.context.fork(),
            resume: self.resume,
        }
    }
}

fn tokens_of(json: &Json, name: &str) -> Vec<Token> {
    let elements = json.get(name).unwrap().elements();
    elements
        .iter()
        .map(|token| token.as_u64().unwrap() as Token)
        .collect()
}

fn number_of(json: &Json, name: &str) -> u32 {
    json.get(name).unwrap().as_u64().unwrap() as u32
}

impl<C: Controller> Steered for Module<p2::BranchMachine<C>> {
    fn begin(&mut self, prompt: &[Token]) -> Result<Init, String> {
        let answer = self.call(
            p2::BranchMachine::init_prompt,
            &format!("{{\"prompt\":{prompt:?}}}"),
        );
        let answered = tokens_of(&answer, "prompt");
        Ok(Init {
            prompt: (answered != prompt).then_some(answered),
        })
    }

    fn bind(&mut self, sequence: u32) {
        self.context.sequence = sequence;
    }

    fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String> {
        let sampled = step
            .sampled
            .map_or_else(|| "null".to_owned(), |token| token.to_string());
        let argument = format!(
            "{{\"backtrack\":{},\"tokens\":{:?},\"sampled\":{sampled},\"fork_group\":{:?}}}",
            step.backtrack, step.tokens, step.fork_group
        );
        self.context.masks.clear();
        let answer = self.call(p2::BranchMachine::mid_process, &argument);
        let branches = answer.get("branches").unwrap().elements();
        Ok(branches.iter().map(|branch| self.branch(branch)).collect())
    }

    fn fork(&mut self) -> Result<Self, String> {
        Ok(self.copy())
    }

    fn take_logs(&mut self) -> String {
        std::mem::take(&mut self.context.logs)
    }
}

impl<C: Controller> Module<p2::BranchMachine<C>> {
    fn branch(&mut self, branch: &Json) -> Branch {
        let splices: Vec<_> = branch
            .get("splices")
            .unwrap()
            .elements()
            .iter()
            .map(|splice| ConditionalSplice {
                when_sampled: tokens_of(splice, "when_sampled"),
                backtrack: number_of(splice, "backtrack"),
                tokens: tokens_of(splice, "ff_tokens"),
            })
            .collect();
        let Some(handle) = branch.get("sample_mask").unwrap().as_u64() else {
            let [splice] = &splices[..] else {
                panic!("{branch:?}")
            };
            assert_eq!(splice.when_sampled, []);
            return Branch::Splice {
                backtrack: splice.backtrack,
                tokens: splice.tokens.clone(),
            };
        };
        let mut sample = Sample::new(self.mask(handle as u32));
        if let Some(temperature) = branch.get("temperature").unwrap().as_f64() {
            sample = sample.temperature(temperature as f32);
        }
        sample.splices = splices;
        Branch::Sample(sample)
    }
}

impl<C: Controller> Steered for Module<p1::StepMachine<C>> {
    fn begin(&mut self, prompt: &[Token]) -> Result<Init, String> {
        let answer = self.call(
            p1::StepMachine::init_prompt,
            &format!("{{\"prompt\":{prompt:?}}}"),
        );
        assert_eq!(answer, Json::Object(vec![]));
        Ok(Init::default())
    }

    fn bind(&mut self, sequence: u32) {
        self.context.sequence = sequence;
    }

    /// The mapping of the specification's table after AI-610.
    fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String> {
        let resume = std::mem::replace(&mut self.resume, Resume::Post);
        if resume != Resume::Mid {
            if resume == Resume::Post && (step.backtrack > 0 || !step.tokens.is_empty()) {
                self.post(step.backtrack, step.tokens);
            }
            if let Some(branches) = self.pre() {
                return Ok(branches);
            }
        }
        self.context.masks.clear();
        let answer = self.call(
            p1::StepMachine::mid_process,
            &format!("{{\"fork_group\":{:?}}}", step.fork_group),
        );
        if answer.as_str() == Some("Stop") {
            return Ok(vec![]);
        }
        Ok(vec![match answer.get("Splice") {
            Some(splice) => Branch::Splice {
                backtrack: number_of(splice, "backtrack"),
                tokens: tokens_of(splice, "ff_tokens"),
            },
            None => self.mask(0).into(),
        }])
    }

    fn fork(&mut self) -> Result<Self, String> {
        Ok(self.copy())
    }

    fn take_logs(&mut self) -> String {
        std::mem::take(&mut self.context.logs)
    }
}

impl<C: Controller> Module<p1::StepMachine<C>> {
    fn post(&mut self, backtrack: u32, tokens: &[Token]) {
        let argument = format!("{{\"tokens\":{tokens:?},\"backtrack\":{backtrack}}}");
        let answer = self.call(p1::StepMachine::post_process, &argument);
        assert_eq!(answer.get("stop"), Some(&Json::Bool(false)));
    }

    /// `pre` with its loop; `None` if `mid` follows.
    fn pre(&mut self) -> Option<Vec<Branch>> {
        let mut appended = Vec::new();
        loop {
            let answer = self.call(p1::StepMachine::pre_process, "{}");
            // A host may ask again before anything happened, and gets the same answer.
            if answer.get("suspend") == Some(&Json::Bool(false)) {
                assert_eq!(self.call(p1::StepMachine::pre_process, "{}"), answer);
            }
            let tokens = tokens_of(&answer, "ff_tokens");
            if !tokens.is_empty() {
                self.post(0, &tokens);
                appended.extend(tokens);
                continue;
            }
            if !appended.is_empty() {
                self.resume = Resume::Pre;
                return Some(vec![Branch::Splice {
                    backtrack: 0,
                    tokens: appended,
                }]);
            }
            let forks = number_of(&answer, "num_forks") as usize;
            return match (answer.get("suspend"), forks) {
                (Some(Json::Bool(true)), 1) => Some(vec![Branch::Noop]),
                (_, 1) => None,
                (_, forks) => {
                    self.resume = Resume::Mid;
                    Some(vec![Branch::Noop; forks])
                }
            };
        }
    }
}

/// Runs a controller natively and in both forms; returns the common result.
fn in_all_forms<C: Controller>(scenario: &Scenario) -> Run {
    let native = scenario.run::<C>();
    let variables = Arc::new(SharedVariables::default());
    let first = Module::new(scenario, &variables, p2::BranchMachine::<C>::new);
    let mut p2 = scenario.drive(first);
    p2.variables = variables.snapshot();
    assert_eq!(p2, native);
    let variables = Arc::new(SharedVariables::default());
    let first = Module::new(scenario, &variables, p1::StepMachine::<C>::new);
    let p1 = scenario.drive(first);
    assert_eq!(p1.texts(), native.texts());
    let ends = |run: &Run| {
        run.sequences
            .iter()
            .map(|sequence| sequence.end.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(ends(&p1), ends(&native));
    assert_eq!(variables.snapshot(), native.variables);
    native
}

/// Fixed text, then digits.
#[derive(Clone)]
struct Digits(Matcher<Pattern>);

impl Default for Digits {
    fn default() -> Self {
        Self(Matcher::new(
            Pattern::new().text("n = ").some_of(ByteClass::DIGIT, 1..=4),
        ))
    }
}

impl Controller for Digits {
    fn step(&mut self, step: Step<'_>) -> Decision {
        assert!(self.0.follow(&step));
        if let [token] = step.tokens {
            // Fast-forwarded text has more tokens.
            assert_eq!(step.sampled, Some(*token));
        }
        self.0.decide()
    }
}

/// AI-604, AI-609
#[test]
fn ai_604_masks_and_fast_forward_are_the_same_in_both_forms() {
    let run = in_all_forms::<Digits>(&Scenario::new("Count: ").prefers(["n = 7102, and"]));
    assert_eq!(run.texts(), ["n = 7102"]);
    assert_eq!(run.sequences[0].end, End::Stop);
}

/// Forks in its second step: each branch writes another letter, then all note their index.
#[derive(Clone, Default)]
struct Letters {
    steps: u32,
    index: usize,
}

impl Controller for Letters {
    fn step(&mut self, step: Step<'_>) -> Decision {
        self.steps += 1;
        match self.steps {
            1 => Decision::fast_forward(tokenize("=")),
            2 => Decision::Fork(vec![
                Mask::only(u32::from(b'a')).into(),
                Branch::Splice {
                    backtrack: 1,
                    tokens: tokenize("b"),
                },
                Mask::only(u32::from(b'c')).into(),
            ]),
            3 => {
                self.index = step.fork_index();
                assert_eq!(step.fork_group, [0, 1, 2]);
                assert_eq!(step.backtrack, u32::from(self.index == 1));
                Vars::write(&self.index.to_string(), step.tokens.len().to_string());
                Decision::Sample(Mask::of(&[u32::from(b'x'), u32::from(b'y')]))
            }
            _ => Decision::Stop,
        }
    }
}

/// AI-609
#[test]
fn ai_609_forks_are_the_same_in_both_forms() {
    let run = in_all_forms::<Letters>(&Scenario::new("").prefers(["=ay", "bx", "=cy"]));
    assert_eq!(run.texts(), ["=ay", "bx", "=cy"]);
    assert_eq!(run.variable("2"), "1");
}

/// Replaces a full stop by an exclamation mark, and adds a space to a question mark.
#[derive(Clone, Default)]
struct Punctuates {
    seen: Vec<Token>,
}

impl Controller for Punctuates {
    fn step(&mut self, step: Step<'_>) -> Decision {
        let kept = self.seen.len() - step.backtrack as usize;
        self.seen.truncate(kept);
        self.seen.extend_from_slice(step.tokens);
        if self.seen.len() >= 5 {
            crate::log!("{:?}", self.seen);
            Vars::write("seen", format!("{:?}", self.seen));
            return Decision::Stop;
        }
        let splice = |when: &str, backtrack, tokens: &str| ConditionalSplice {
            when_sampled: tokenize(when),
            backtrack,
            tokens: tokenize(tokens),
        };
        Sample::new(Mask::all())
            .temperature(0.25)
            .splice(splice(".", 1, "!"))
            .splice(splice("?", 0, " "))
            .splice(splice("#", 2, ";;"))
            .into()
    }
}

/// AI-505
#[test]
fn ai_505_conditional_splices_are_the_same_in_both_forms() {
    for (preferred, expected) in [("a.b?d", "a!b? "), ("ab#ef", "a;;ef"), ("abcdef", "abcde")] {
        let run = in_all_forms::<Punctuates>(&Scenario::new("").prefers([preferred]));
        assert_eq!(run.texts(), [expected], "{preferred}");
    }
}

/// Adds to the prompt, waits twice, and then allows nothing but the end.
#[derive(Clone, Default)]
struct Waits {
    steps: u32,
}

impl Controller for Waits {
    fn init(&mut self, prompt: &[Token]) -> Init {
        Init {
            prompt: Some(prompt.to_vec()),
        }
    }

    fn step(&mut self, step: Step<'_>) -> Decision {
        assert_eq!(step.tokens, []);
        self.steps += 1;
        if self.steps < 2 {
            Decision::Noop
        } else if self.steps < 3 {
            Decision::wait_for("x")
        } else {
            Mask::only(crate::eos_token()).into()
        }
    }
}

/// AI-813
#[test]
fn ai_813_waiting_is_the_same_in_both_forms() {
    let run = in_all_forms::<Waits>(&Scenario::new("a prompt"));
    assert_eq!(run.sequences[0].end, End::Eos);
}

/// Waits for two variables.
#[derive(Clone, Default)]
struct WaitsForTwo;

impl Controller for WaitsForTwo {
    fn step(&mut self, _step: Step<'_>) -> Decision {
        Decision::Wait(vec!["a\"b".into(), "c".into()])
    }
}

#[test]
fn ai_1005_both_forms_name_the_variables_that_they_wait_for() {
    let scenario = Scenario::new("");
    let new = p2::BranchMachine::<WaitsForTwo>::new;
    let mut module = Module::new(&scenario, &Arc::default(), new);
    let argument = br#"{"backtrack":0,"tokens":[],"sampled":null,"fork_group":[0]}"#;
    let result = host::enter(&mut module.context, || module.machine.mid_process(argument));
    assert_eq!(
        result,
        r#"{"branches":[{"sample_mask":null,"temperature":null,"splices":[{"when_sampled":[],"backtrack":0,"ff_tokens":[]}],"wait":["a\"b","c"]}]}"#
    );
    let new = p1::StepMachine::<WaitsForTwo>::new;
    let mut module = Module::new(&scenario, &Arc::default(), new);
    let result = host::enter(&mut module.context, || module.machine.pre_process(b"{}"));
    assert_eq!(
        result,
        r#"{"num_forks":1,"suspend":true,"ff_tokens":[],"wait":["a\"b","c"]}"#
    );
}

/// AI-606
#[test]
#[should_panic = "the host's argument of a callback: invalid JSON at byte 0"]
fn ai_606_an_argument_that_is_no_json_is_a_panic() {
    let scenario = Scenario::new("");
    let mut module = Module::new(&scenario, &Arc::default(), p2::BranchMachine::<Waits>::new);
    // Errors are panics, which the context of the module must outlive here.
    let json = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        host::enter(&mut module.context, || module.machine.mid_process(b"?"))
    }));
    std::panic::resume_unwind(json.unwrap_err());
}
