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

/// Numbers of rows that all started requests hold together: 128 MiB. A request holds all its rows from its first text on.
const STARTED_NUMBERS_MAX: usize = 32 << 20;
/// Numbers of a request that starts beyond that if its caller has no other, so that it need not wait for the end of large ones.
const SMALL_NUMBERS_MAX: usize = STARTED_NUMBERS_MAX >> 10;

/// The texts that wait. Callers take turns, and so do the requests of each (D-54), a text each: a small request does not wait
/// for the end of a large one, and a caller with one request not for all those of another.
#[derive(Debug)]
pub(super) struct TextQueue {
    limits: BatchLimits,
    /// In the order of their turns. Each has a request.
    callers: VecDeque<WaitingCaller>,
}

#[derive(Debug)]
struct WaitingCaller {
    caller: u64,
    /// In the order of their turns. Each has a text left.
    requests: VecDeque<WaitingRequest>,
}

/// A request that waits for its turn.
#[derive(Debug)]
pub(super) struct WaitingRequest {
    pub(super) request: usize,
    /// Numbers of all its rows.
    pub(super) numbers: usize,
    /// Tokens of each text.
    pub(super) lengths: VecDeque<usize>,
    /// Texts that were taken.
    pub(super) taken: usize,
}

/// A batch that is put together.
#[derive(Default)]
struct Draft {
    texts: Vec<PlannedText>,
    tokens: usize,
    /// Numbers of all started requests.
    started: usize,
}

impl TextQueue {
    pub(super) fn new(limits: BatchLimits) -> Self {
        Self {
            limits,
            callers: VecDeque::new(),
        }
    }

    /// Adds a request of a caller; it comes last.
    pub(super) fn add(&mut self, caller: u64, request: WaitingRequest) {
        if request.lengths.is_empty() {
            return;
        }
        match self.callers.iter_mut().find(|it| it.caller == caller) {
            Some(waiting) => waiting.requests.push_back(request),
            None => self.callers.push_back(WaitingCaller {
                caller,
                requests: VecDeque::from([request]),
            }),
        }
    }

    /// Removes the texts of a request that are left.
    pub(super) fn remove(&mut self, request: usize) {
        for caller in &mut self.callers {
            caller.requests.retain(|waiting| waiting.request != request);
        }
        self.callers.retain(|caller| !caller.requests.is_empty());
    }

    /// Returns whether no text is left.
    pub(super) fn is_empty(&self) -> bool {
        self.callers.is_empty()
    }

    /// Takes the texts of the next batch. The first in turn is always among them, however long it is; those that do not fit
    /// beside it keep their turn.
    pub(super) fn next_batch(&mut self) -> Vec<PlannedText> {
        let requests = self.callers.iter().flat_map(|caller| &caller.requests);
        let started = requests.filter(|waiting| waiting.taken > 0);
        let mut draft = Draft {
            started: started.map(|waiting| waiting.numbers).sum(),
            ..Draft::default()
        };
        // Callers with a text that was passed over come first next time, or a long text would wait for ever. They may still
        // have shorter ones for this batch.
        let mut passed_over: Vec<u64> = Vec::new();
        let mut in_vain = 0;
        while draft.texts.len() < self.limits.texts.max(1)
            && (draft.texts.is_empty() || draft.tokens < self.limits.tokens)
            && in_vain < self.callers.len()
        {
            let Some(mut caller) = self.callers.pop_front() else {
                break;
            };
            let (turn, is_passed_over) = caller.turn(&draft, self.limits);
            if is_passed_over && !passed_over.contains(&caller.caller) {
                passed_over.push(caller.caller);
            }
            in_vain = match turn {
                Some(index) => {
                    caller.take(index, &mut draft);
                    0
                }
                None => in_vain + 1,
            };
            if !caller.requests.is_empty() {
                self.callers.push_back(caller);
            }
        }
        let place = |caller: &WaitingCaller| passed_over.iter().position(|it| *it == caller.caller);
        let callers = self.callers.make_contiguous();
        callers.sort_by_key(|caller| place(caller).unwrap_or(usize::MAX));
        draft.texts
    }
}

impl WaitingCaller {
    /// The request whose text is next, and whether one before it does not fit beside what is in the batch.
    fn turn(&self, draft: &Draft, limits: BatchLimits) -> (Option<usize>, bool) {
        let has_started = self.requests.iter().any(|waiting| waiting.taken > 0);
        let mut passed_over = false;
        for (index, waiting) in self.requests.iter().enumerate() {
            if waiting.taken == 0 && !may_start(waiting.numbers, draft.started, has_started) {
                continue;
            }
            let length = waiting.lengths.front().copied().unwrap_or(0);
            if draft.texts.is_empty() || draft.tokens + length <= limits.tokens {
                return (Some(index), passed_over);
            }
            passed_over = true;
        }
        (None, passed_over)
    }

    /// Takes the next text of a request, whose turn is the last then.
    fn take(&mut self, index: usize, draft: &mut Draft) {
        let Some(mut waiting) = self.requests.remove(index) else {
            return;
        };
        let Some(length) = waiting.lengths.pop_front() else {
            return;
        };
        if waiting.taken == 0 {
            draft.started += waiting.numbers;
        }
        draft.tokens += length;
        draft.texts.push(PlannedText {
            request: waiting.request,
            text: waiting.taken,
        });
        waiting.taken += 1;
        if !waiting.lengths.is_empty() {
            self.requests.push_back(waiting);
        }
    }
}

/// Returns whether a request with so many numbers may start beside those that all started ones have. Half of the room is left
/// to callers that have none.
fn may_start(numbers: usize, started: usize, has_started: bool) -> bool {
    let all = started.saturating_add(numbers);
    match has_started {
        true => all <= STARTED_NUMBERS_MAX / 2,
        false => all <= STARTED_NUMBERS_MAX || started == 0 || numbers <= SMALL_NUMBERS_MAX,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn queue(tokens: usize, texts: usize, requests: &[&[usize]]) -> TextQueue {
        let mut queue = TextQueue::new(BatchLimits { tokens, texts });
        for (request, lengths) in requests.iter().enumerate() {
            queue.add(0, waiting(request, lengths));
        }
        queue
    }

    fn waiting(request: usize, lengths: &[usize]) -> WaitingRequest {
        WaitingRequest {
            request,
            numbers: lengths.len(),
            lengths: lengths.iter().copied().collect(),
            taken: 0,
        }
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
        queue.add(0, waiting(2, &[]));
        assert_eq!(all(&mut queue), [[(0, 1)]]);
        assert!(queue.next_batch().is_empty());
    }

    #[test]
    fn d_54_callers_take_turns_before_their_requests() {
        for parallel in [1, 2, 3] {
            let mut queue = queue(9, parallel, &[&[1; 4][..]; 100]);
            queue.add(1, waiting(100, &[1; 4]));
            let texts: Vec<usize> = (0..8)
                .flat_map(|_| queue.next_batch())
                .map(|it| it.request)
                .take(8)
                .collect();
            assert_eq!(texts, [0, 100, 1, 100, 2, 100, 3, 100]);
        }
    }

    #[test]
    fn a_long_text_is_not_passed_over_for_ever() {
        let mut queue = queue(9, 2, &[]);
        queue.add(1, waiting(7, &[2; 50]));
        queue.add(0, waiting(0, &[9]));
        queue.add(0, waiting(1, &[1; 50]));
        let mut next = || {
            let batch = queue.next_batch().into_iter();
            batch.map(|it| it.request).collect::<Vec<_>>()
        };
        assert_eq!((next(), next()), (vec![7, 1], vec![0]));
    }

    #[test]
    fn started_requests_hold_a_limited_number_of_rows() {
        const LARGE: usize = STARTED_NUMBERS_MAX / 16;
        let with = |request, numbers| WaitingRequest {
            numbers,
            ..waiting(request, &[1; 3])
        };
        let mut queue = queue(usize::MAX, 24, &[]);
        (0..30).for_each(|request| queue.add(0, with(request, LARGE)));
        let requests = |batch: Vec<PlannedText>| -> Vec<usize> {
            let mut requests: Vec<usize> = batch.iter().map(|it| it.request).collect();
            requests.sort_unstable();
            requests.dedup();
            requests
        };
        // One caller has half of the room.
        assert_eq!(requests(queue.next_batch()), (0..8).collect::<Vec<_>>());
        // Others have the rest, one each before a second one, and what is small is not limited.
        let mut queue = self::queue(usize::MAX, 40, &[]);
        (0..20).for_each(|request| queue.add(0, with(request, LARGE)));
        (100..120).for_each(|request| queue.add(request as u64, with(request, LARGE)));
        queue.add(200, with(200, SMALL_NUMBERS_MAX));
        let started = requests(queue.next_batch());
        assert_eq!(
            started,
            [0].into_iter()
                .chain(100..115)
                .chain([200])
                .collect::<Vec<_>>()
        );
        // What is larger than all of it is computed alone.
        let mut queue = self::queue(9, 9, &[]);
        queue.add(0, with(1, 2 * STARTED_NUMBERS_MAX));
        queue.add(0, with(2, 1));
        queue.add(1, with(3, 2 * STARTED_NUMBERS_MAX));
        assert_eq!(requests(queue.next_batch()), [1, 2]);
        assert_eq!(requests(queue.next_batch()), [3]);
        assert!(queue.is_empty());
    }

    proptest! {
        /// Every text is computed once, in the order of its request, and no batch exceeds the limits.
        #[test]
        fn every_text_is_in_one_batch(
            tokens in 1_usize..40, texts in 1_usize..6,
            requests in proptest::collection::vec(proptest::collection::vec(1_usize..50, 0..8), 0..6),
        ) {
            let given: Vec<&[usize]> = requests.iter().map(Vec::as_slice).collect();
            let mut queue = queue(tokens, texts, &[]);
            for (request, lengths) in given.into_iter().enumerate() {
                queue.add(request as u64 % 3, waiting(request, lengths));
            }
            let batches = all(&mut queue);
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
