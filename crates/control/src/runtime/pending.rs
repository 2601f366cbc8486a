//! Instances between `instantiate` and their first step, and who counts as live (AI-313, AI-314, section 11).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::envelope::RequestError;

/// Limits of instances and sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingLimits {
    /// Instances that are not bound yet.
    pub(crate) instances: usize,
    /// How long one may wait to be bound.
    pub(crate) ttl: Duration,
    /// Live sequences, instances included.
    pub(crate) sequences: usize,
}

impl Default for PendingLimits {
    fn default() -> Self {
        Self {
            instances: 1_024,
            ttl: Duration::from_secs(300),
            sequences: 4_096,
        }
    }
}

/// The instances that no sequence has been bound to yet, by request id. Shared by both channels.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    instances: Mutex<HashMap<String, Instance<T>>>,
    counts: Arc<Counts>,
    limits: PendingLimits,
}

#[derive(Debug)]
enum Instance<T> {
    /// Its callbacks at the start are not done.
    Starting,
    Ready {
        sequence: T,
        member: Member,
        since: Instant,
    },
}

/// A request id that is taken, until it is dropped: its instance is about to start.
#[derive(Debug)]
pub(crate) struct Reservation<T> {
    pending: Arc<Pending<T>>,
    /// Taken when the instance becomes ready.
    member: Option<Member>,
    request: String,
}

/// One live sequence of a request.
#[derive(Debug)]
pub(crate) struct Member {
    group: Arc<RequestGroup>,
}

/// All sequences of a request.
#[derive(Debug)]
struct RequestGroup {
    request: String,
    /// Its live sequences.
    members: AtomicUsize,
    counts: Arc<Counts>,
}

/// What the limits are compared with.
#[derive(Debug, Default)]
struct Counts {
    sequences: AtomicUsize,
    /// The ids of requests that have members.
    requests: Mutex<HashSet<String>>,
}

impl<T> Pending<T> {
    pub(crate) fn new(limits: PendingLimits) -> Arc<Self> {
        Arc::new(Self {
            instances: Mutex::new(HashMap::new()),
            counts: Arc::default(),
            limits,
        })
    }

    /// Takes a request id for an instance that starts.
    ///
    /// # Errors
    /// It is taken, or a limit is reached.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        request: &str,
        now: Instant,
    ) -> Result<Reservation<T>, RequestError> {
        self.drop_expired(now);
        let mut instances = lock(&self.instances);
        if instances.contains_key(request) || lock(&self.counts.requests).contains(request) {
            return Err(RequestError::user(format!("duplicate req_id {request}")));
        }
        if instances.len() >= self.limits.instances {
            return Err(RequestError::user("too many pending requests"));
        }
        let member = Member::first(request, &self.counts, self.limits.sequences)
            .ok_or_else(|| RequestError::user("too many sequences"))?;
        instances.insert(request.to_owned(), Instance::Starting);
        drop(instances);
        Ok(Reservation {
            pending: Arc::clone(self),
            member: Some(member),
            request: request.to_owned(),
        })
    }

    /// Drops the instances that were not bound in time, whose controllers end with them (AI-314). Both channels call it
    /// before each request, and the side one now and then while it has nothing to do.
    pub(crate) fn drop_expired(&self, now: Instant) {
        // Without the lock, because dropping an instance may take a while.
        drop(self.expire(now));
    }

    /// Takes out what waited for too long.
    fn expire(&self, now: Instant) -> Vec<Instance<T>> {
        let expired = |_: &String, instance: &mut Instance<T>| match instance {
            Instance::Starting => false,
            Instance::Ready { since, .. } => {
                now.saturating_duration_since(*since) >= self.limits.ttl
            }
        };
        let mut instances = lock(&self.instances);
        let expired = instances.extract_if(expired);
        expired.map(|(_, instance)| instance).collect()
    }

    /// Whether a request can be bound.
    pub(crate) fn is_ready(&self, request: &str) -> bool {
        matches!(
            lock(&self.instances).get(request),
            Some(Instance::Ready { .. })
        )
    }

    /// Takes the instance of a request, to bind it.
    pub(crate) fn take(&self, request: &str) -> Option<(T, Member)> {
        let mut instances = lock(&self.instances);
        if !matches!(instances.get(request), Some(Instance::Ready { .. })) {
            return None;
        }
        match instances.remove(request) {
            Some(Instance::Ready {
                sequence, member, ..
            }) => Some((sequence, member)),
            _ => None,
        }
    }

    /// Takes an instance that was never bound, to drop it; also one whose time is over.
    pub(crate) fn remove(&self, request: &str) -> bool {
        self.take(request).is_some()
    }

    /// Returns how many instances wait, and how many sequences live.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            lock(&self.instances).len(),
            self.counts.sequences.load(Ordering::Relaxed),
        )
    }
}

impl<T> Reservation<T> {
    /// The id of the request.
    pub(crate) fn request(&self) -> &str {
        &self.request
    }

    /// From here on the instance can be bound.
    pub(crate) fn ready(mut self, sequence: T, now: Instant) {
        if let Some(member) = self.member.take() {
            let ready = Instance::Ready {
                sequence,
                member,
                since: now,
            };
            lock(&self.pending.instances).insert(self.request.clone(), ready);
        }
    }
}

impl<T> Drop for Reservation<T> {
    fn drop(&mut self) {
        // A failed start frees the id; a ready one has given its member away.
        if self.member.is_some() {
            lock(&self.pending.instances).remove(&self.request);
        }
    }
}

impl Member {
    fn first(request: &str, counts: &Arc<Counts>, limit: usize) -> Option<Self> {
        add(&counts.sequences, limit).then(|| {
            lock(&counts.requests).insert(request.to_owned());
            Self {
                group: Arc::new(RequestGroup {
                    request: request.to_owned(),
                    members: AtomicUsize::new(1),
                    counts: Arc::clone(counts),
                }),
            }
        })
    }

    /// A further sequence of the request.
    ///
    /// # Errors
    /// The text of the limit that is reached (AI-413).
    pub(crate) fn fork(&self, forks: usize, sequences: usize) -> Result<Self, String> {
        if !add(&self.group.counts.sequences, sequences) {
            return Err("too many sequences".into());
        }
        if !add(&self.group.members, forks) {
            self.group.counts.sequences.fetch_sub(1, Ordering::Relaxed);
            return Err(format!("too many forks (max={forks})"));
        }
        Ok(Self {
            group: Arc::clone(&self.group),
        })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.group.members.fetch_sub(1, Ordering::Relaxed);
        self.group.counts.sequences.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for RequestGroup {
    fn drop(&mut self) {
        lock(&self.counts.requests).remove(&self.request);
    }
}

/// Adds one, unless there are `limit` already.
fn add(count: &AtomicUsize, limit: usize) -> bool {
    let next = |count: usize| (count < limit).then_some(count + 1);
    count
        .try_update(Ordering::Relaxed, Ordering::Relaxed, next)
        .is_ok()
}

/// A panic cannot leave these maps half changed: each is changed by one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> PendingLimits {
        PendingLimits {
            instances: 2,
            ttl: Duration::from_secs(300),
            sequences: 4,
        }
    }

    fn text<T>(result: Result<T, RequestError>) -> String {
        result.err().unwrap().text
    }

    #[test]
    fn ai_313_a_request_id_is_taken_from_its_start_until_its_last_sequence_ends() {
        let pending = Pending::new(limits());
        let now = Instant::now();
        let reserved = pending.reserve("r", now).unwrap();
        assert!(!pending.is_ready("r") && pending.take("r").is_none());
        assert_eq!(text(pending.reserve("r", now)), "duplicate req_id r");
        reserved.ready(7, now);
        assert_eq!(text(pending.reserve("r", now)), "duplicate req_id r");
        assert!(pending.is_ready("r"));
        let (sequence, member) = pending.take("r").unwrap();
        assert_eq!((sequence, pending.is_ready("r")), (7, false));
        assert_eq!(text(pending.reserve("r", now)), "duplicate req_id r");
        let fork = member.fork(16, 4).unwrap();
        drop(member);
        assert_eq!(text(pending.reserve("r", now)), "duplicate req_id r");
        drop(fork);
        assert!(pending.reserve("r", now).is_ok());
    }

    #[test]
    fn a_failed_start_frees_its_id() {
        let pending: Arc<Pending<u8>> = Pending::new(limits());
        let now = Instant::now();
        drop(pending.reserve("r", now).unwrap());
        assert!(pending.reserve("r", now).is_ok());
        assert_eq!(pending.counts(), (0, 0));
    }

    #[test]
    fn ai_314_an_instance_that_is_not_bound_in_time_is_dropped() {
        let pending = Pending::new(limits());
        let now = Instant::now();
        pending.reserve("a", now).unwrap().ready(1, now);
        let later = now + Duration::from_secs(299);
        assert_eq!(text(pending.reserve("a", later)), "duplicate req_id a");
        let expired = now + Duration::from_secs(300);
        assert!(pending.reserve("a", expired).is_ok());
        assert!(!pending.is_ready("a"));
        // Without another one that starts.
        pending.reserve("b", now).unwrap().ready(1, now);
        pending.drop_expired(later);
        assert!(pending.is_ready("b"));
        pending.drop_expired(expired);
        assert!(!pending.is_ready("b") && pending.take("b").is_none());
        assert_eq!(pending.counts(), (0, 0));
    }

    /// AI-413
    #[test]
    fn ai_1090_pending_instances_sequences_and_forks_have_limits() {
        let pending = Pending::new(limits());
        let now = Instant::now();
        pending.reserve("a", now).unwrap().ready(1, now);
        let starting = pending.reserve("b", now).unwrap();
        assert_eq!(text(pending.reserve("c", now)), "too many pending requests");
        drop(starting);
        let (_, member) = pending.take("a").unwrap();
        let fork = member.fork(2, 4).unwrap();
        assert_eq!(member.fork(2, 4).unwrap_err(), "too many forks (max=2)");
        assert_eq!(fork.fork(2, 2).unwrap_err(), "too many sequences");
        pending.reserve("c", now).unwrap().ready(2, now);
        pending.reserve("d", now).unwrap().ready(3, now);
        let _bound = pending.take("d");
        assert_eq!(pending.counts(), (1, 4));
        assert_eq!(text(pending.reserve("e", now)), "too many sequences");
        drop(fork);
        assert!(member.fork(2, 4).is_ok());
        assert!(pending.reserve("e", now).is_ok());
        assert!(pending.remove("c") && !pending.remove("c"));
    }
}
