//! Something that happens once, and that any number of tasks may wait for.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Flag {
    is_set: AtomicBool,
    changed: Notify,
}

impl Flag {
    /// Sets the flag and returns whether this call was the first to do so.
    pub(crate) fn set(&self) -> bool {
        let first = !self.is_set.swap(true, Ordering::SeqCst);
        self.changed.notify_waiters();
        first
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Returns once the flag is set, at once if it is already.
    pub(crate) async fn wait(&self) {
        // The future is made before the check: it hears of every `set` after its making.
        let changed = self.changed.notified();
        if !self.is_set() {
            changed.await;
        }
    }
}
