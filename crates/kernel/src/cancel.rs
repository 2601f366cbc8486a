//! Cancellation: a token that asks a call to end.
//!
//! Reading the flag takes no lock; firing it wakes every waiter and fires every child, once.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

/// A request to stop, shared between the side that cancels and the calls that are cancelled. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<Signal>);

#[derive(Debug, Default)]
struct Signal {
    fired: AtomicBool,
    listeners: Mutex<Listeners>,
    parent: Option<(Cancel, usize)>,
}

#[derive(Debug, Default)]
struct Listeners {
    slots: Vec<Option<CancelListener>>,
    free: Vec<usize>,
}

#[derive(Debug)]
enum CancelListener {
    Task(Waker),
    Child(Weak<Signal>),
}

impl Listeners {
    fn insert(&mut self, listener: CancelListener) -> usize {
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(listener);
            return slot;
        }
        self.slots.push(Some(listener));
        self.slots.len() - 1
    }

    fn remove(&mut self, slot: usize) {
        if let Some(position) = self.slots.get_mut(slot)
            && position.take().is_some()
        {
            self.free.push(slot);
        }
    }
}

impl Signal {
    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        // No code of ours panics while it holds this lock, and the list is valid after every statement.
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        if let Some((parent, slot)) = self.parent.take() {
            parent.0.listeners().remove(slot);
        }
    }
}

impl Cancel {
    /// A token that has not fired.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A child token: fires with this one, and may fire alone.
    #[must_use]
    pub fn child(&self) -> Self {
        // Registered with a weak pointer, so that a parent that lives long does not keep the calls that have ended.
        let child = Arc::new_cyclic(|weak| {
            let slot = self
                .0
                .listeners()
                .insert(CancelListener::Child(weak.clone()));
            Signal {
                fired: AtomicBool::new(false),
                listeners: Mutex::default(),
                parent: Some((self.clone(), slot)),
            }
        });
        let child = Self(child);
        // The parent may have fired before its child was registered.
        if self.is_cancelled() {
            child.cancel();
        }
        child
    }

    /// Requests cancellation. Further calls have no effect.
    pub fn cancel(&self) {
        // Set before the listeners are taken: a task that registers after that sees the flag and does not wait.
        if self.0.fired.swap(true, Ordering::AcqRel) {
            return;
        }
        let listeners: Vec<CancelListener> = {
            let mut retained = self.0.listeners();
            retained.slots.iter_mut().filter_map(Option::take).collect()
        };
        // Outside the lock: a waker may run any code, and a child has locks of its own.
        for listener in listeners {
            match listener {
                CancelListener::Task(waker) => waker.wake(),
                CancelListener::Child(child) => {
                    if let Some(signal) = child.upgrade() {
                        Self(signal).cancel();
                    }
                }
            }
        }
    }

    /// Whether cancellation was requested.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.fired.load(Ordering::Acquire)
    }

    /// Whether both are the same token.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Resolves when cancellation is requested.
    #[must_use]
    pub fn cancelled(&self) -> Cancelled {
        Cancelled {
            cancel: self.clone(),
            slot: None,
        }
    }
}

/// Resolves when its [`Cancel`] fires.
#[derive(Debug)]
pub struct Cancelled {
    cancel: Cancel,
    slot: Option<(usize, Waker)>,
}

impl Future for Cancelled {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.cancel.is_cancelled() {
            return Poll::Ready(());
        }
        let registered = self.slot.as_ref();
        if registered.is_none_or(|(_, waker)| !waker.will_wake(cx.waker())) {
            let cancel = self.cancel.clone();
            // The old waker belongs to another task, which must not be woken for this future any more.
            let mut listeners = cancel.0.listeners();
            if let Some((slot, _)) = self.slot.take() {
                listeners.remove(slot);
            }
            let slot = listeners.insert(CancelListener::Task(cx.waker().clone()));
            drop(listeners);
            self.slot = Some((slot, cx.waker().clone()));
        }
        // It may have fired between the first check and the registration.
        if self.cancel.is_cancelled() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for Cancelled {
    fn drop(&mut self) {
        if let Some((slot, _)) = self.slot.take() {
            self.cancel.0.listeners().remove(slot);
        }
    }
}
