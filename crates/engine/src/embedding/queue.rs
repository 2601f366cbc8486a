//! [`TextQueue`]: which texts are in the next batch.

use std::collections::VecDeque;

/// What fits in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchLimits {
    /// Tokens. A text that has more is alone in its batch.
    pub(super) tokens: usize,
    /// Texts.
    pub(super) texts: usize,
}

/// One text of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedText {
    pub(super) request: usize,
    /// Its index in the request.
    pub(super) text: usize,
}

/// The texts that wait, by request. Requests take turns, a text each, so that a small one does not wait for the end of a large
/// one.
#[derive(Debug)]
pub(super) struct TextQueue {
    limits: BatchLimits,
    /// In the order of their turns. Each has a text left.
    requests: VecDeque<WaitingRequest>,
}

#[derive(Debug)]
struct WaitingRequest {
    request: usize,
    /// Tokens of each text.
    lengths: Vec<usize>,
    /// The first text that is left.
    next: usize,
}

impl TextQueue {
    pub(super) fn new(limits: BatchLimits) -> Self {
        Self {
            limits,
            requests: VecDeque::new(),
        }
    }

    /// Adds a request with the numbers of tokens of its texts; it comes last.
    pub(super) fn add(&mut self, request: usize, lengths: Vec<usize>) {
        if !lengths.is_empty() {
            let waiting = WaitingRequest {
                request,
                lengths,
                next: 0,
            };
            self.requests.push_back(waiting);
        }
    }

    /// Removes the texts of a request that are left.
    pub(super) fn remove(&mut self, request: usize) {
        self.requests.retain(|waiting| waiting.request != request);
    }

    /// Returns whether no text is left.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes the texts of the next batch. The first in turn is always among them, however long it is; those that do not fit
    /// beside it keep their turn.
    pub(super) fn next_batch(&mut self) -> Vec<PlannedText> {
        let mut batch = Vec::new();
        let mut tokens = 0;
        let mut passed_over = VecDeque::new();
        while batch.len() < self.limits.texts.max(1)
            && (batch.is_empty() || tokens < self.limits.tokens)
        {
            let Some(mut waiting) = self.requests.pop_front() else {
                break;
            };
            let length = waiting.lengths[waiting.next];
            if !batch.is_empty() && tokens + length > self.limits.tokens {
                passed_over.push_back(waiting);
                continue;
            }
            tokens += length;
            batch.push(PlannedText {
                request: waiting.request,
                text: waiting.next,
            });
            waiting.next += 1;
            if waiting.next < waiting.lengths.len() {
                self.requests.push_back(waiting);
            }
        }
        // Before those that had a turn: otherwise a long text would be passed over for ever.
        while let Some(waiting) = passed_over.pop_back() {
            self.requests.push_front(waiting);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn queue(tokens: usize, texts: usize, requests: &[&[usize]]) -> TextQueue {
        let mut queue = TextQueue::new(BatchLimits { tokens, texts });
        for (request, lengths) in requests.iter().enumerate() {
            queue.add(request, lengths.to_vec());
        }
        queue
    }

    fn all(queue: &mut TextQueue) -> Vec<Vec<(usize, usize)>> {
        let mut batches = Vec::new();
        while !queue.is_empty() {
            let batch = queue.next_batch().into_iter();
            batches.push(batch.map(|it| (it.request, it.text)).collect());
        }
        batches
    }

    #[test]
    fn requests_take_turns_within_what_fits_in_a_batch() {
        for (tokens, texts, requests, expect) in [
            (
                9,
                9,
                &[&[3, 3, 3, 3][..]][..],
                &[&[(0, 0), (0, 1), (0, 2)][..], &[(0, 3)]][..],
            ),
            // A small request is served beside a large one, not after it.
            (
                6,
                9,
                &[&[3; 4], &[2]],
                &[&[(0, 0), (1, 0)], &[(0, 1), (0, 2)], &[(0, 3)]],
            ),
            (9, 2, &[&[1, 1], &[1]], &[&[(0, 0), (1, 0)], &[(0, 1)]]),
            // A text above the limit is alone, and what does not fit beside the first keeps its turn.
            (4, 9, &[&[9], &[1]], &[&[(0, 0)], &[(1, 0)]]),
            (
                4,
                9,
                &[&[3, 3], &[2], &[1]],
                &[&[(0, 0), (2, 0)], &[(1, 0)], &[(0, 1)]],
            ),
            (0, 0, &[&[1], &[1]], &[&[(0, 0)], &[(1, 0)]]),
        ] {
            let batches = all(&mut queue(tokens, texts, requests));
            assert_eq!(batches, expect, "{tokens} {texts} {requests:?}");
        }
    }

    #[test]
    fn a_removed_request_is_in_no_batch() {
        let mut queue = queue(2, 9, &[&[1, 1], &[1, 1, 1]]);
        assert_eq!(queue.next_batch().len(), 2);
        queue.remove(1);
        queue.add(2, Vec::new());
        assert_eq!(all(&mut queue), [[(0, 1)]]);
    }

    proptest! {
        /// Every text is computed once, in the order of its request, and no batch exceeds the limits.
        #[test]
        fn every_text_is_in_one_batch(
            tokens in 1_usize..40, texts in 1_usize..6,
            requests in proptest::collection::vec(proptest::collection::vec(1_usize..50, 0..8), 0..6),
        ) {
            let given: Vec<&[usize]> = requests.iter().map(Vec::as_slice).collect();
            let batches = all(&mut queue(tokens, texts, &given));
            for batch in &batches {
                let sum: usize = batch.iter().map(|(request, text)| requests[*request][*text]).sum();
                prop_assert!(batch.len() <= texts && (sum <= tokens || batch.len() == 1));
            }
            for (request, lengths) in requests.iter().enumerate() {
                let seen = batches.iter().flatten().filter(|it| it.0 == request).map(|it| it.1);
                prop_assert_eq!(seen.collect::<Vec<_>>(), (0..lengths.len()).collect::<Vec<_>>());
            }
        }
    }
}
