//! The engine's part of a run: asks each sequence's controller, and does to the sequence what it decides.

use super::{End, Run, Sequence, ToyModel};
use crate::native::NativeController;
use crate::{Branch, Controller, Init, Mask, Sample, SequenceId, Step, Token};

/// Something that steers one sequence: a native controller, or a module in a host.
pub trait Steered: Sized {
    /// Passes the prompt.
    ///
    /// # Errors
    /// It failed, with this message.
    fn begin(&mut self, prompt: &[Token]) -> Result<Init, String>;

    /// Sets the number of the sequence.
    fn bind(&mut self, sequence: SequenceId);

    /// Asks for the next step. No branches end the sequence.
    ///
    /// # Errors
    /// It failed, with this message.
    fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String>;

    /// The controller of a fork.
    ///
    /// # Errors
    /// It failed, with this message.
    fn fork(&mut self) -> Result<Self, String>;

    /// Takes what it printed since the last call.
    fn take_logs(&mut self) -> String;
}

impl<C: Controller> Steered for NativeController<C> {
    fn begin(&mut self, prompt: &[Token]) -> Result<Init, String> {
        Self::begin(self, prompt).map_err(|panic| panic.0)
    }

    fn bind(&mut self, sequence: SequenceId) {
        Self::bind(self, sequence);
    }

    fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String> {
        Self::step(self, step).map_err(|panic| panic.0)
    }

    fn fork(&mut self) -> Result<Self, String> {
        Ok(Self::fork(self))
    }

    fn take_logs(&mut self) -> String {
        Self::take_logs(self)
    }
}

/// One running sequence.
struct Running<S> {
    steered: S,
    /// What was generated after the prompt.
    tokens: Vec<Token>,
    happened: Happened,
    group: Vec<SequenceId>,
    logs: String,
    steps: usize,
    end: Option<End>,
}

#[derive(Clone, Default)]
struct Happened {
    backtrack: u32,
    tokens: Vec<Token>,
    sampled: Option<Token>,
}

/// Runs the sequences of one request, one after another in each step.
pub(super) struct Engine<'s> {
    model: ToyModel,
    preferred: &'s [String],
    steps_max: usize,
}

/// Sequences of one request.
const SEQUENCES_MAX: usize = 64;
/// Steps without any progress before the request is a deadlock (AI-813).
const IDLE_STEPS_MAX: usize = 3;

impl<'s> Engine<'s> {
    pub(super) fn new(preferred: &'s [String], steps_max: usize) -> Self {
        Self {
            model: ToyModel::new(),
            preferred,
            steps_max,
        }
    }

    pub(super) fn run<S: Steered>(&self, mut first: S, prompt: &[Token]) -> Run {
        if let Err(message) = first.begin(prompt) {
            return Run::failed(message);
        }
        first.bind(0);
        let mut sequences = vec![Running {
            steered: first,
            tokens: Vec::new(),
            happened: Happened::default(),
            group: vec![0],
            logs: String::new(),
            steps: 0,
            end: None,
        }];
        let mut idle_steps = 0;
        while sequences.iter().any(|sequence| sequence.end.is_none()) {
            let busy = self.step(&mut sequences);
            idle_steps = if busy { 0 } else { idle_steps + 1 };
            if idle_steps > IDLE_STEPS_MAX {
                for sequence in &mut sequences {
                    sequence.end.get_or_insert(End::Deadlock);
                }
            }
        }
        let finished = sequences
            .into_iter()
            .zip(0..)
            .map(|(running, id)| self.finish(running, id));
        Run {
            sequences: finished.collect(),
            ..Run::default()
        }
    }

    fn finish<S>(&self, running: Running<S>, id: SequenceId) -> Sequence {
        let bytes = crate::native::Model::trie(&self.model).decode(&running.tokens);
        Sequence {
            id,
            text: String::from_utf8_lossy(&bytes).into_owned(),
            logs: running.logs,
            end: running.end.unwrap_or(End::Length),
        }
    }

    /// Does one step with every sequence that has not ended. Returns whether one did anything.
    fn step<S: Steered>(&self, sequences: &mut Vec<Running<S>>) -> bool {
        let mut busy = false;
        // Forks of this step take part in the next one.
        for id in 0..sequences.len() {
            if sequences[id].end.is_some() {
                continue;
            }
            let branches = sequences[id].ask(id as SequenceId);
            let result = branches.and_then(|branches| self.apply(sequences, id, branches));
            match result {
                Ok(did) => busy |= did,
                Err(message) => {
                    sequences[id].end = Some(End::Failed(message));
                    busy = true;
                }
            }
            let running = &mut sequences[id];
            running.steps += 1;
            if running.steps >= self.steps_max {
                running.end.get_or_insert(End::Length);
            }
        }
        busy
    }

    fn apply<S: Steered>(
        &self,
        sequences: &mut Vec<Running<S>>,
        id: usize,
        branches: Vec<Branch>,
    ) -> Result<bool, String> {
        if branches.is_empty() {
            sequences[id].end = Some(End::Stop);
            return Ok(true);
        }
        if sequences.len() + branches.len() > SEQUENCES_MAX + 1 {
            return Err("too many forks".into());
        }
        let mut members = vec![id];
        for _ in 1..branches.len() {
            let number = sequences.len();
            let forked = sequences[id].fork(number as SequenceId)?;
            members.push(number);
            sequences.push(forked);
        }
        let group: Vec<SequenceId> = members.iter().map(|&member| member as SequenceId).collect();
        let mut busy = false;
        for (member, branch) in members.into_iter().zip(branches) {
            let sequence = &mut sequences[member];
            sequence.group.clone_from(&group);
            match self.advance(sequence, member, branch) {
                Ok(did) => busy |= did,
                // A branch that cannot be done costs its own sequence.
                Err(message) => sequence.end = Some(End::Failed(message)),
            }
        }
        Ok(busy)
    }

    fn advance<S>(
        &self,
        sequence: &mut Running<S>,
        id: usize,
        branch: Branch,
    ) -> Result<bool, String> {
        match branch {
            // Asked again in the next step: a wait may always end early.
            Branch::Noop | Branch::Wait(_) => Ok(false),
            Branch::Splice { backtrack, tokens } => {
                let busy = backtrack > 0 || !tokens.is_empty();
                sequence.append(backtrack, &tokens, None)?;
                Ok(busy)
            }
            Branch::Sample(sample) => self.sample(sequence, id, &sample).map(|()| true),
        }
    }

    fn sample<S>(
        &self,
        sequence: &mut Running<S>,
        id: usize,
        sample: &Sample,
    ) -> Result<(), String> {
        let mask = sample.mask.mask();
        let eos_alone = mask.count() <= usize::from(mask.allows(ToyModel::EOS));
        if eos_alone {
            // An empty mask is the same (AI-237).
            sequence.end = Some(End::Eos);
            return Ok(());
        }
        let token = self.preferred_token(sequence, id, mask);
        let splice = sample
            .splices
            .iter()
            .find(|splice| splice.applies_to(token));
        let Some(splice) = splice else {
            return sequence.append(0, &[token], Some(token));
        };
        // The splice counts the sampled token, which was not appended yet.
        let mut tokens = splice.tokens.clone();
        if splice.backtrack == 0 {
            tokens.insert(0, token);
        }
        sequence.append(splice.backtrack.saturating_sub(1), &tokens, Some(token))
    }

    fn preferred_token<S>(&self, sequence: &Running<S>, id: usize, mask: &Mask) -> Token {
        let trie = crate::native::Model::trie(&self.model);
        let generated = trie.decode(&sequence.tokens).len();
        let preferred = self
            .preferred
            .get(id)
            .or_else(|| self.preferred.last())
            .map_or("", String::as_str);
        let rest = preferred.as_bytes().get(generated..).unwrap_or_default();
        let continuing = mask
            .iter()
            .filter(|&token| !trie.is_special(token) && rest.starts_with(trie.token_bytes(token)));
        let longest = continuing.max_by_key(|&token| trie.token_bytes(token).len());
        let eos = mask.allows(ToyModel::EOS).then_some(ToyModel::EOS);
        longest
            .or(eos)
            .or_else(|| mask.iter().next())
            .unwrap_or(ToyModel::EOS)
    }
}

impl<S: Steered> Running<S> {
    fn ask(&mut self, id: SequenceId) -> Result<Vec<Branch>, String> {
        let happened = std::mem::take(&mut self.happened);
        let group = std::mem::replace(&mut self.group, vec![id]);
        let branches = self.steered.step(Step {
            backtrack: happened.backtrack,
            tokens: &happened.tokens,
            sampled: happened.sampled,
            fork_group: &group,
        });
        self.logs.push_str(&self.steered.take_logs());
        branches
    }

    fn fork(&mut self, id: SequenceId) -> Result<Self, String> {
        let mut steered = self.steered.fork()?;
        steered.bind(id);
        Ok(Self {
            steered,
            tokens: self.tokens.clone(),
            happened: Happened::default(),
            group: Vec::new(),
            logs: String::new(),
            steps: self.steps,
            end: None,
        })
    }
}

impl<S> Running<S> {
    fn append(
        &mut self,
        backtrack: u32,
        tokens: &[Token],
        sampled: Option<Token>,
    ) -> Result<(), String> {
        let Some(kept) = self.tokens.len().checked_sub(backtrack as usize) else {
            return Err(format!("backtrack {backtrack} past the beginning"));
        };
        self.tokens.truncate(kept);
        self.tokens.extend_from_slice(tokens);
        self.happened = Happened {
            backtrack,
            tokens: tokens.to_vec(),
            sampled,
        };
        Ok(())
    }
}
