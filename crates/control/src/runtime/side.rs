//! [`SideChannel`]: uploads, tags and instances, many at once and answered as they end (AI-306 to AI-316).
//!
//! ```text
//!   thread of the channel: accept ──► SideQueue ──► workers: work ──► answer
//!                                         ▲            │ instantiate: the instance starts on the host's threads
//!                                         └── begun ◄──┘ (its waker)
//! ```
//!
//! Nothing here holds a lock that the main channel waits for, except for the time of a map operation.

mod launch;
mod modules;
mod queue;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood_proto::steer::{ControllerStore, SteerUser, StepWaker, Token};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::launch::Launches;
use self::queue::Job;
pub(crate) use self::queue::{SIDE_PENDING_MAX, SideQueue, Ticket, Weight};
use super::answer::AnswerRoom;
use super::envelope::{self, Envelope, RequestError, Unreadable};
use super::hello::{self, WireFeatures};
use super::main_channel::{Dialect, DialectCell};
use super::pending::Pending;
use super::sequence::Sequence;
use super::wake::StepWake;

/// Starts controllers.
pub(crate) trait Launcher: Send + Sync + 'static {
    /// What runs in the main channel.
    type Sequence: Sequence;

    /// Starts an instance: its first outcome is that of the callbacks at the start.
    ///
    /// # Errors
    /// There is no such controller, or it cannot be started.
    fn launch(&self, launch: Launch<'_>) -> Result<Self::Sequence, RequestError>;

    /// Tokenises a prompt, with the model's begin-of-sequence token in front if it has one (AI-314).
    fn tokenize_prompt(&self, text: &str) -> Vec<Token>;

    /// The size of the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Bytes of memory of all controllers.
    fn memory_bytes(&self) -> u64;
}

/// What an instance is started with.
pub(crate) struct Launch<'a> {
    pub(crate) user: SteerUser<'a>,
    pub(crate) controller: &'a str,
    pub(crate) arg: &'a str,
    pub(crate) prompt: Vec<Token>,
    pub(crate) dialect: Dialect,
    pub(crate) waker: Arc<dyn StepWaker>,
}

/// Sends the answer to the request of a `$rid`. May wait for the engine to read the one before.
pub(crate) type SendAnswer = Box<dyn Fn(Option<&str>, Vec<u8>) + Send + Sync>;

/// The ops of the side channel.
pub(crate) struct SideChannel<L: Launcher> {
    queue: Arc<SideQueue>,
    store: Arc<dyn ControllerStore>,
    launches: Launches<L>,
    features: Arc<WireFeatures>,
    pending: Arc<Pending<L::Sequence>>,
    /// `mk_module` is switched off.
    restricted: bool,
    send: SendAnswer,
}

/// What a side channel is made of.
pub(crate) struct SideParts<L: Launcher> {
    pub(crate) launcher: L,
    pub(crate) store: Arc<dyn ControllerStore>,
    pub(crate) pending: Arc<Pending<L::Sequence>>,
    pub(crate) dialect: Arc<DialectCell>,
    pub(crate) features: Arc<WireFeatures>,
    pub(crate) wake: Arc<StepWake>,
    pub(crate) restricted: bool,
    /// How long answers may be.
    pub(crate) room: AnswerRoom,
    pub(crate) send: SendAnswer,
}

impl<L: Launcher> SideChannel<L> {
    pub(crate) fn new(parts: SideParts<L>) -> Self {
        let queue = Arc::new(SideQueue::default());
        let pending = Arc::clone(&parts.pending);
        Self {
            launches: Launches::new(
                parts.launcher,
                parts.pending,
                (parts.dialect, Arc::clone(&parts.features)),
                parts.wake,
                (Arc::clone(&queue), parts.room),
            ),
            features: parts.features,
            queue,
            store: parts.store,
            pending,
            restricted: parts.restricted,
            send: parts.send,
        }
    }

    /// Takes a message: answers it, or queues it for the workers.
    pub(crate) fn accept(&self, message: &[u8]) {
        self.pending.drop_expired(Instant::now());
        let envelope = match Envelope::parse(message) {
            Ok(envelope) => envelope,
            Err(Unreadable(error)) => return self.unreadable(&error),
        };
        let rid = envelope.rid.clone();
        // Of the wrong shape it is an error, also where nothing depends on the user.
        if let Err(error) = envelope.user() {
            return self.answer(rid.as_deref(), &Err::<(), _>(error));
        }
        let answer = match envelope.op.as_str() {
            "ping" => Ok(json!({"pong": 1})),
            "hello" => hello::answer(envelope, &self.features),
            "cancel" => self.cancel(envelope),
            "drop" => self.drop_instance(envelope),
            "stats" => Ok(self.stats()),
            "mk_module" | "set_tags" | "get_tags" | "instantiate" | "list_modules"
            | "describe_module" | "delete_tags" | "delete_module" => {
                if self.queue.admit(envelope) {
                    return;
                }
                Err(RequestError::user("too many pending requests"))
            }
            _ => Err(RequestError::bad_op()),
        };
        self.answer(rid.as_deref(), &answer);
    }

    fn answer<T: Serialize>(&self, rid: Option<&str>, answer: &Result<T, RequestError>) {
        (self.send)(rid, envelope::encode(rid, answer));
    }

    /// Answers a message that is no request.
    pub(crate) fn unreadable(&self, error: &str) {
        (self.send)(None, envelope::encode_unreadable(error));
    }

    /// Works until the queue is closed, on jobs of at most this weight. One thread for each of [`SIDE_WORKERS`] does.
    pub(crate) fn work(&self, most: Weight) {
        while let Some(job) = self.queue.next(most, IDLE_TURN) {
            self.take(job);
        }
    }

    fn take(&self, job: Job) {
        match job {
            Job::Request(ticket, envelope) => self.run(ticket, envelope),
            Job::Begun(number) => {
                let Some(ended) = self.launches.poll(number) else {
                    return;
                };
                if self.queue.finish(&ended.ticket) {
                    (self.send)(ended.ticket.rid.as_deref(), ended.answer);
                } else {
                    // Cancelled at the last moment: the engine was told that there is no instance.
                    self.pending.remove(&ended.request);
                }
            }
            Job::Idle => self.pending.drop_expired(Instant::now()),
        }
    }

    fn run(&self, ticket: Ticket, envelope: Envelope) {
        if envelope.op == "instantiate" {
            match self.launches.begin(ticket, envelope) {
                Ok(()) => {}
                Err((ticket, error)) => self.finish(&ticket, &Err(error)),
            }
            return;
        }
        let answer = self.manage(envelope);
        self.finish(&ticket, &answer);
    }

    fn manage(&self, envelope: Envelope) -> Result<Value, RequestError> {
        let user = envelope.user()?;
        // Whoever can write the region is trusted to name the user (AI-302).
        let user = SteerUser {
            name: &user.name,
            is_admin: user.is_admin,
            may_control: true,
        };
        let changes = matches!(
            &*envelope.op,
            "mk_module" | "set_tags" | "delete_tags" | "delete_module"
        );
        if changes && self.restricted {
            return Err(RequestError::user("module upload disabled"));
        }
        modules::run(&*self.store, user, envelope)
    }

    fn finish(&self, ticket: &Ticket, answer: &Result<Value, RequestError>) {
        // A cancelled request has its answer already.
        if self.queue.finish(ticket) {
            self.answer(ticket.rid.as_deref(), answer);
        }
    }

    fn cancel(&self, envelope: Envelope) -> Result<Value, RequestError> {
        #[derive(Deserialize)]
        struct Cancel {
            rid: String,
        }
        let Cancel { rid } = envelope.decode()?;
        let tickets = self.queue.cancel(&rid);
        for ticket in &tickets {
            self.launches.cancel(ticket.number);
            let error = RequestError::user("cancelled");
            self.answer(Some(&rid), &Err::<(), _>(error));
        }
        Ok(json!({"cancelled": tickets.len()}))
    }

    fn drop_instance(&self, envelope: Envelope) -> Result<Value, RequestError> {
        #[derive(Deserialize)]
        struct DropInstance {
            req_id: String,
        }
        let DropInstance { req_id } = envelope.decode()?;
        if self.pending.remove(&req_id) {
            return Ok(json!({}));
        }
        Err(RequestError::user(format!("invalid req_id {req_id}")))
    }

    fn stats(&self) -> Value {
        let (pending, sequences) = self.pending.counts();
        json!({
            "pending_instances": pending,
            "sequences": sequences,
            "side_pending": self.queue.open(),
            "memory_bytes": self.launches.memory_bytes(),
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    /// Lets the workers end.
    #[cfg(test)]
    pub(crate) fn close(&self) {
        self.queue.close();
    }
}

/// How often an idle runtime looks for instances that were not bound in time.
const IDLE_TURN: Duration = Duration::from_secs(10);

/// What each worker takes at most. Uploads take as long as compilations, and must not keep all of the workers: the others
/// go on with instances that need no compiler, and the first of them with what takes no time at all (AI-306).
pub(crate) const SIDE_WORKERS: [Weight; 4] = [
    Weight::Quick,
    Weight::MayCompile,
    Weight::Compiles,
    Weight::Compiles,
];

#[cfg(test)]
mod tests;
