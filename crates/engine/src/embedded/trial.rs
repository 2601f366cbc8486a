//! Decodes the first tokens of a model to find out whether it can compute at all.
//!
//! llama.cpp has several hundred assertions about a model, some of which are reached only when it computes, and a
//! failed assertion ends the process. No list of checks is complete, so a process with other work has a file loaded and
//! tried in another process first.

use std::time::Instant;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::Embedded;
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};

impl Embedded {
    /// Computes a short prompt in two slots at once and one more token in each, as requests do. The slots are free
    /// afterwards if that succeeds.
    ///
    /// It may end the process instead of returning.
    ///
    /// # Errors
    /// Why the model cannot be used, for people.
    pub fn try_out(&mut self) -> Result<(), String> {
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

    /// Computes a short prompt twice in a free slot, and takes the time of the second. The first brings the weights into
    /// memory and starts the threads, so that the first request does not wait for that.
    pub(super) fn warm_up(&mut self) {
        let most = self.info.context_tokens.min(self.capacity().batch_tokens);
        let prompt: Vec<BatchEntry> = (0..WARM_UP_TOKENS.min(most))
            .map(|position| BatchEntry {
                slot: 0,
                position,
                token: position as Token % self.info.vocabulary_tokens.max(1),
                row: false,
            })
            .collect();
        for _ in 0..2 {
            let began = Instant::now();
            let computed = self.compute(&prompt);
            let took = began.elapsed();
            self.release(0);
            // What a model cannot do is said by its first request, or by a trial before it is served.
            if computed.is_err() {
                return;
            }
            self.token_time = Some(took / u32::try_from(prompt.len()).unwrap_or(1).max(1));
        }
    }

    /// Decodes a batch and checks its output rows.
    fn compute(&mut self, batch: &[BatchEntry]) -> Result<(), String> {
        if batch.is_empty() {
            return Ok(());
        }
        self.decode(batch, Time::ZERO).map_err(|stop| match stop {
            DecodeStop::Full => "its cache has no room for a few tokens".to_owned(),
            DecodeStop::Aborted => "it was interrupted at its first tokens".to_owned(),
            DecodeStop::Failed(error) | DecodeStop::Dead(error) => error.to_string(),
        })?;
        for (index, entry) in batch.iter().enumerate() {
            if !entry.row {
                continue;
            }
            match self.row(index, Time::ZERO) {
                // Infinite logits are allowed: they exclude tokens.
                OutputRow::Logits(logits) if !logits.iter().any(|logit| logit.is_nan()) => {}
                OutputRow::Failed(error) => return Err(error.to_string()),
                _ => return Err("its logits are not numbers".to_owned()),
            }
        }
        Ok(())
    }
}

const PROMPT_TOKENS: u32 = 4;
/// Enough for the kernels that compute several tokens at once.
const WARM_UP_TOKENS: u32 = 32;
