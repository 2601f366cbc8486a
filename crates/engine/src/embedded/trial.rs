//! Decodes the first tokens of a model to find out whether it can compute at all.
//!
//! llama.cpp has several hundred assertions about a model, some of which are reached only when it computes, and a
//! failed assertion ends the process. No list of checks is complete, so a process with other work has a file loaded and
//! tried in another process first.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::Embedded;
use crate::adapters::{AdapterInfo, default_scales};
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose, WarmTimes};

impl Embedded {
    /// Computes a short prompt in two slots at once and one more token in each, as requests do. The slots are free
    /// afterwards if that succeeds.
    ///
    /// It may end the process instead of returning.
    ///
    /// # Errors
    /// Why the model cannot be used, for people.
    pub fn try_out(&mut self) -> Result<(), String> {
        if let Some(draft) = &mut self.draft {
            let tried = draft.try_out();
            tried.map_err(|why| format!("its draft model: {why}"))?;
        }
        let capacity = self.capacity();
        let slots = 0..capacity.slots.min(2);
        let opening = SlotPurpose {
            prompt: &[],
            seed: 0,
            choice: 0,
            max_tokens: None,
        };
        // Two slots, because requests run side by side: llama.cpp splits such a batch differently from one of a single
        // sequence.
        slots.clone().for_each(|slot| self.open(slot, &opening));
        // A context or a batch may be as short as one token.
        let most = self
            .info
            .context_tokens
            .min(capacity.batch_tokens / slots.end);
        let prompt = PROMPT_TOKENS.min(most);
        for positions in [0..prompt, prompt..most.min(prompt + 1)] {
            let last = positions.end.saturating_sub(1);
            let entry = |slot: SlotId, position: u32| BatchEntry {
                slot,
                position,
                // The tokens do not matter; the modulus keeps their ids within the vocabulary.
                token: position as Token % self.info.vocabulary_tokens.max(1),
                row: position == last,
            };
            let entries = slots.clone();
            let batch: Vec<BatchEntry> = entries
                .flat_map(|slot| positions.clone().map(move |position| entry(slot, position)))
                .collect();
            self.compute(&batch)?;
        }
        slots.for_each(|slot| self.release(slot));
        Ok(())
    }

    /// Computes with all adapters at once, whatever is applied by default: then no request is the first for which llama.cpp
    /// lays out that graph, which some architectures have no room for, and allocates its memory. Those that are applied by
    /// default are set afterwards.
    ///
    /// It may end the process instead of returning.
    pub(super) fn try_adapters(&mut self, adapters: &[AdapterInfo]) -> Result<(), String> {
        let applied = default_scales(adapters);
        if applied.contains(&0.0) {
            // All but nothing: what stays in the KV cells is a number.
            self.set_adapters(&vec![1e-6; adapters.len()]);
            let most = self.info.context_tokens.min(self.capacity().batch_tokens);
            let tried = self.time_of(WARM_UP_TOKENS.min(most));
            tried.map_err(|why| format!("all its LoRA adapters together: {why}"))?;
        }
        self.set_adapters(&applied);
        Ok(())
    }

    /// Computes a short prompt, single tokens, and the prompt again, each in a free slot, and takes the times of the latter two.
    /// The first brings the weights into memory and starts the threads, so that the first request does not wait for that.
    pub(super) fn warm_up(&mut self) {
        // One model at a time: their threads would keep each other from the processors, and what is measured would say
        // nothing.
        let _alone = WARMING.lock().unwrap_or_else(PoisonError::into_inner);
        let most = self.info.context_tokens.min(self.capacity().batch_tokens);
        let prompt = WARM_UP_TOKENS.min(most);
        // What a model cannot do is said by its first request, or by a trial before it is served.
        let Ok(_) = self.time_of(prompt) else { return };
        // Beside a busy process the first long prompt should not be the one that finds the better number of threads.
        let began = Instant::now();
        // The shortest: beside others a call now and then takes many times as long.
        let mut decode = Duration::MAX;
        for _ in 0..WARM_UP_CALLS {
            let Ok(took) = self.time_of(1) else { return };
            decode = decode.min(took);
            if began.elapsed() > WARM_UP_MAX {
                break;
            }
        }
        let mut all = Duration::MAX;
        for _ in 0..WARM_UP_PROMPTS {
            let Ok(took) = self.time_of(prompt) else {
                return;
            };
            all = all.min(took);
            if began.elapsed() > WARM_UP_MAX {
                break;
            }
        }
        self.warm_times = Some(warm_times(decode, all, prompt));
    }

    /// Computes so many tokens in a free slot.
    fn time_of(&mut self, tokens: u32) -> Result<Duration, String> {
        let entry = |position: u32| BatchEntry {
            slot: 0,
            position,
            token: position as Token % self.info.vocabulary_tokens.max(1),
            row: false,
        };
        let batch: Vec<BatchEntry> = (0..tokens).map(entry).collect();
        let began = Instant::now();
        let computed = self.compute(&batch);
        let took = began.elapsed().saturating_sub(self.waited());
        self.release(0);
        computed.map(|()| took)
    }

    /// Decodes a batch and checks its output rows.
    fn compute(&mut self, batch: &[BatchEntry]) -> Result<(), String> {
        if batch.is_empty() {
            return Ok(());
        }
        self.decode(batch, Time::ZERO).map_err(|stop| match stop {
            DecodeStop::Full => "its cache has no room for a few tokens".to_owned(),
            DecodeStop::Aborted => "it was interrupted at its first tokens".to_owned(),
            DecodeStop::Failed(error) | DecodeStop::SlotsLost(error) | DecodeStop::Dead(error) => {
                error.to_string()
            }
        })?;
        for (index, entry) in batch.iter().enumerate() {
            if !entry.row {
                continue;
            }
            match self.row(index, Time::ZERO) {
                OutputRow::Logits(logits) if are_numbers(logits) => {}
                OutputRow::Failed(error) => return Err(error.to_string()),
                _ => return Err("its logits are not numbers".to_owned()),
            }
        }
        Ok(())
    }
}

/// Returns whether one of these logits is the largest: minus infinity excludes a token, and may not exclude all.
fn are_numbers(logits: &[f32]) -> bool {
    let is_excluded = |logit: f32| logit == f32::NEG_INFINITY;
    let is_one = |&logit: &f32| logit.is_finite() || is_excluded(logit);
    logits.iter().all(is_one) && logits.iter().any(|logit| logit.is_finite())
}

const PROMPT_TOKENS: u32 = 4;
/// Enough for the kernels that compute several tokens at once.
const WARM_UP_TOKENS: u32 = 32;
/// As many calls as it takes to choose a number of threads between two.
const WARM_UP_CALLS: u32 = 20;
/// As many prompts as make it likely that one of them was not held up.
const WARM_UP_PROMPTS: u32 = 3;
/// Larger models choose while they answer: their load should not take longer for it.
const WARM_UP_MAX: Duration = Duration::from_millis(500);
/// Held while a model warms up.
static WARMING: Mutex<()> = Mutex::new(());

/// Of a call with one token, and of a prompt of so many.
fn warm_times(decode: Duration, prompt: Duration, tokens: u32) -> WarmTimes {
    let more = prompt.saturating_sub(decode) / tokens.saturating_sub(1).max(1);
    // A call that was held up may have taken longer than the prompt. Tokens that seem to take nothing would all be in the first
    // step, however many they are.
    let token = more.max(prompt / tokens.max(1) / 4);
    WarmTimes { decode, token }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_was_held_up_makes_no_token_free() {
        let ms = Duration::from_millis;
        let usual = warm_times(ms(10), ms(41), 32);
        assert_eq!((usual.decode, usual.token), (ms(10), ms(1)));
        for decode in [41, 50, 5_000] {
            let token = warm_times(ms(decode), ms(41), 32).token;
            assert!(token >= ms(41) / 32 / 4, "{decode}: {token:?}");
        }
        assert!(warm_times(ms(10), ms(8), 1).token > Duration::ZERO);
    }

    #[test]
    fn a_row_without_a_largest_logit_is_no_output() {
        let (none, most) = (f32::NEG_INFINITY, f32::INFINITY);
        assert!(are_numbers(&[1.0, none]));
        for row in [&[none, none][..], &[1.0, most], &[1.0, f32::NAN], &[]] {
            assert!(!are_numbers(row), "{row:?}");
        }
    }
}
