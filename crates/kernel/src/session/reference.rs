//! External content: fetched when a reader reaches it, once for all readers of a session (EV-410).
//!
//! ```text
//!   untouched ── first reader ──► fetching ── end or error ──► cached, until the fragment with the reference is released
//!       ▲                            │
//!       └──── last reader leaves ────┘ the task is aborted
//! ```
//!
//! The task does not wait for readers: the content is retained anyway, and is bounded. So a slow reader does not delay
//! a fetch.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use sapwood_proto::evergreen::{Reason, SessionLimits, Status};
use sapwood_proto::log::{Log, LogRead};
use sapwood_proto::session::ExternalContent;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::Instrument;

/// Fetches external content.
pub trait ReferenceFetch: fmt::Debug + Send + Sync {
    /// Opens the content of `uri`. Nothing happens before the first poll; dropping the future cancels it.
    ///
    /// # Errors
    /// `REF_SCHEME`, `REF_DENIED`, `REF_NOT_FOUND` or `REF_FETCH`, with a message that is safe to send to a client.
    fn open<'a>(&'a self, uri: &'a str) -> BoxFuture<'a, Result<FoundContent, Status>>;
}

/// Content that was found and is about to be streamed.
pub struct FoundContent {
    /// The declared length in bytes, if there is one.
    pub bytes: Option<u64>,
    /// The bytes; nothing follows an error. Dropping the stream ends the fetch.
    pub pieces: BoxStream<'static, Result<Bytes, Status>>,
}

impl fmt::Debug for FoundContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FoundContent")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// The fetches of one session.
#[derive(Clone)]
pub(super) struct SessionFetcher(Arc<FetcherShared>);

struct FetcherShared {
    resolve: Arc<dyn ReferenceFetch>,
    limits: Arc<SessionLimits>,
    permits: Semaphore,
    /// Bytes retained of all references.
    retained: AtomicU64,
}

impl SessionFetcher {
    pub(super) fn new(resolve: &Arc<dyn ReferenceFetch>, limits: &Arc<SessionLimits>) -> Self {
        Self(Arc::new(FetcherShared {
            resolve: Arc::clone(resolve),
            limits: Arc::clone(limits),
            permits: Semaphore::new(limits.max_ref_fetches),
            retained: AtomicU64::new(0),
        }))
    }

    /// Bytes of fetched content that the session retains.
    pub(super) fn retained(&self) -> u64 {
        self.0.retained.load(Ordering::Relaxed)
    }

    /// Opens a reader of `content`, at its first byte. The first reader starts the fetch.
    pub(super) fn read(&self, content: &ExternalContent) -> ReferenceReader {
        // Kept with the fragment that has the reference: readers share it, and it goes when the fragment is released.
        let fetch = content.keep(CachedFetch::default);
        let mut state = fetch.lock();
        state.readers += 1;
        let running = state
            .running
            .get_or_insert_with(|| RunningFetch::begin(self, content.uri()));
        let fetched = Arc::clone(&running.fetched);
        drop(state);
        ReferenceReader {
            fetch,
            fetched,
            position: 0,
        }
    }

    /// Charges bytes that are about to be retained.
    fn hold(&self, bytes: u64) -> Result<(), Status> {
        let max = self.0.limits.ref_bytes;
        // Added before it is compared: two fetches at once could both pass a check that comes first.
        let value = self.0.retained.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if value > max {
            self.give_back(bytes);
            return Err(Status::limit(Reason::RefLimit, "ref_bytes", value, max));
        }
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        self.0.retained.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Fetches `uri` and appends its bytes to `into`.
    async fn fetch(&self, uri: &str, fetched: &FetchedBytes) -> Result<(), Status> {
        let limits = &self.0.limits;
        // The semaphore is never closed.
        let _place = self.0.permits.acquire().await.ok();
        // The times count from here: a fetch that waits for a permit is not late.
        let (first, total) = (limits.ref_first_byte, limits.ref_total);
        let fetching = async {
            let opening = async {
                let mut content = self.0.resolve.open(uri).await?;
                self.check_declared(content.bytes)?;
                // Opening has only sent a request; the limit is about the first byte (EV-416).
                let piece = content.pieces.next().await;
                Ok((content, piece))
            };
            let begun = timeout(first, opening).await;
            let (mut content, mut piece) = begun.unwrap_or_else(|_| Err(late("begun", first)))?;
            let mut bytes = 0;
            while let Some(data) = piece {
                let data = data?;
                bytes += data.len() as u64;
                // The declared length is not trusted.
                within("max_ref_bytes", bytes, limits.max_ref_bytes)?;
                fetched.append(data)?;
                piece = content.pieces.next().await;
            }
            Ok(())
        };
        let fetched = timeout(total, fetching).await;
        fetched.unwrap_or_else(|_| Err(late("ended", total)))
    }

    /// Content that is declared too large is refused before it is read.
    fn check_declared(&self, bytes: Option<u64>) -> Result<(), Status> {
        let (bytes, limits) = (bytes.unwrap_or(0), &self.0.limits);
        within("max_ref_bytes", bytes, limits.max_ref_bytes)?;
        within(
            "ref_bytes",
            self.retained().saturating_add(bytes),
            limits.ref_bytes,
        )
    }
}

impl fmt::Debug for SessionFetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionFetcher")
            .field("retained", &self.retained())
            .finish_non_exhaustive()
    }
}

/// The state of a reference: its readers and its fetch.
#[derive(Default)]
struct CachedFetch(Mutex<FetchState>);

#[derive(Default)]
struct FetchState {
    readers: usize,
    running: Option<RunningFetch>,
}

impl CachedFetch {
    fn lock(&self) -> MutexGuard<'_, FetchState> {
        // Nothing panics under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a reader. When the last one leaves, an unfinished fetch is aborted.
    fn leave(&self) {
        let mut state = self.lock();
        state.readers -= 1;
        let idle = state.readers == 0;
        // Complete content stays for later readers (EV-410); an unfinished fetch has no reader any more.
        let given_up = state
            .running
            .take_if(|running| idle && !running.fetched.has_ended());
        // Outside the lock: dropping the fetch aborts its task and releases the content.
        drop(state);
        drop(given_up);
    }
}

/// A fetch, from its start until its content is released. Dropping it aborts the task.
struct RunningFetch {
    fetched: Arc<FetchedBytes>,
    task: JoinHandle<()>,
}

impl RunningFetch {
    fn begin(references: &SessionFetcher, uri: &str) -> Self {
        let fetched = Arc::new(FetchedBytes {
            references: references.clone(),
            progress: Mutex::default(),
        });
        let into = Arc::clone(&fetched);
        let (references, uri) = (references.clone(), uri.to_owned());
        let task = async move {
            // The guard reports an end even if the resolver panics: no stream ends silently.
            let _ending = FetchGuard(&into);
            let outcome = references.fetch(&uri, &into).await;
            if let Err(status) = &outcome {
                tracing::debug!(reason = %status.reason, "could not fetch a reference");
            }
            into.end(outcome);
        };
        // A task of its own, because all readers share the fetch and none of them may hold it up.
        let task = tokio::spawn(task.in_current_span());
        Self { fetched, task }
    }
}

impl Drop for RunningFetch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Ends the fetched content in any case, with an error if nothing else did.
struct FetchGuard<'a>(&'a FetchedBytes);

impl Drop for FetchGuard<'_> {
    fn drop(&mut self) {
        let message = "the content of a reference was not fetched to its end";
        // Has no effect if an end was reported before.
        self.0.end(Err(Status::new(Reason::RefFetch, message)));
    }
}

/// The bytes fetched so far, and how the fetch ended.
struct FetchedBytes {
    references: SessionFetcher,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    log: Log<Bytes, Result<(), Arc<Status>>>,
    retained: u64,
    waiting: Vec<Waker>,
}

impl FetchedBytes {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        // Nothing panics under this lock.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, data: Bytes) -> Result<(), Status> {
        if data.is_empty() {
            return Ok(());
        }
        // A small piece costs more than its bytes, and must not keep a large buffer alive, so it is copied.
        let cost = data.len().max(PIECE_BYTES) as u64;
        let data = if data.len() < COPY_BELOW_BYTES {
            Bytes::copy_from_slice(&data)
        } else {
            data
        };
        self.references.hold(cost)?;
        let mut progress = self.lock();
        progress.retained += cost;
        // Only this task ends the log, and afterwards it appends nothing.
        let _open = progress.log.append(data);
        // Readers are woken without the lock, which they take at once.
        let waiting = std::mem::take(&mut progress.waiting);
        drop(progress);
        waiting.into_iter().for_each(Waker::wake);
        Ok(())
    }

    fn end(&self, outcome: Result<(), Status>) {
        let mut progress = self.lock();
        let _first = progress.log.end(outcome.map_err(Arc::new));
        let waiting = std::mem::take(&mut progress.waiting);
        drop(progress);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn has_ended(&self) -> bool {
        self.lock().log.ended().is_some()
    }
}

impl Drop for FetchedBytes {
    fn drop(&mut self) {
        let pending = self.lock().retained;
        self.references.give_back(pending);
    }
}

/// A reader of the content of one reference. Dropping the last one ends the fetch.
pub(super) struct ReferenceReader {
    fetch: Arc<CachedFetch>,
    fetched: Arc<FetchedBytes>,
    position: usize,
}

impl ReferenceReader {
    /// The next bytes; `None` at the end. Nothing follows an error.
    pub(super) fn poll_piece(
        &mut self,
        cx: &Context<'_>,
    ) -> Poll<Option<Result<Bytes, Arc<Status>>>> {
        let mut progress = self.fetched.lock();
        match progress.log.at(self.position) {
            LogRead::Item(data) => {
                let data = data.clone();
                self.position += 1;
                Poll::Ready(Some(Ok(data)))
            }
            LogRead::End(Err(status)) => Poll::Ready(Some(Err(Arc::clone(status)))),
            // Nothing is released from this log.
            LogRead::End(Ok(())) | LogRead::Released => Poll::Ready(None),
            LogRead::Pending => {
                let known = progress.waiting.iter();
                if !known.into_iter().any(|waker| waker.will_wake(cx.waker())) {
                    progress.waiting.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for ReferenceReader {
    fn drop(&mut self) {
        self.fetch.leave();
    }
}

fn within(limit: &'static str, value: u64, max: u64) -> Result<(), Status> {
    if value <= max {
        return Ok(());
    }
    Err(Status::limit(Reason::RefLimit, limit, value, max))
}

fn late(what: &str, after: Duration) -> Status {
    let message = format!("the content of a reference had not {what} after {after:?}");
    Status::new(Reason::RefFetch, message)
}

/// Bytes charged for a piece at least.
const PIECE_BYTES: usize = 128;
/// Pieces below this are copied out of the buffer that they came in.
const COPY_BELOW_BYTES: usize = 1024;
