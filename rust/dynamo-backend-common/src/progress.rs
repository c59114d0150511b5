//! Does the work go on: what runs, and since when nothing came of it.
//!
//! One look a second, and only while requests run. A request counts what it sent anyway, and the look reads these counts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::plane::lock;

const BEAT: Duration = Duration::from_secs(1);

/// What one request is known by.
#[derive(Debug, Default)]
struct Mark {
    chunks: AtomicU64,
    /// Its caller does not read: that is not the engine's silence.
    is_held_back: AtomicBool,
}

#[derive(Debug, Default)]
struct Entry {
    mark: Arc<Mark>,
    seen: u64,
    silent_beats: u64,
}

#[derive(Debug, Default)]
struct Book {
    running: HashMap<u64, Entry>,
    next: u64,
    /// Since the last look a request ended by itself.
    has_answered: bool,
    silent_beats: u64,
    longest_beats: u64,
}

/// Watches the requests of one worker. Silence is counted in looks of the runtime itself: while the process stood still,
/// nothing could have come, and that is one look, however long it was.
#[derive(Debug)]
pub(crate) struct Progress {
    limit_seconds: f64,
    book: Mutex<Book>,
    began: Notify,
}

impl Progress {
    /// After `limit_seconds` without anything from any request there is trouble; 0: never.
    pub(crate) fn new(limit_seconds: f64) -> Arc<Self> {
        Arc::new(Self { limit_seconds, book: Mutex::default(), began: Notify::new() })
    }

    /// Enters a request; it leaves when the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> WatchedRequest {
        let mut book = lock(&self.book);
        let entry = Entry::default();
        let mark = Arc::clone(&entry.mark);
        let number = book.next;
        book.next += 1;
        let is_first = book.running.is_empty();
        book.running.insert(number, entry);
        drop(book);
        if is_first {
            self.began.notify_one();
        }
        WatchedRequest { progress: Arc::clone(self), number, mark, is_answered: false }
    }

    /// Looks for ever.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            if lock(&self.book).running.is_empty() {
                self.began.notified().await;
            }
            tokio::time::sleep(BEAT).await;
            self.beat();
        }
    }

    fn beat(&self) {
        let mut book = lock(&self.book);
        let (mut has_moved, mut could_speak, mut longest) = (std::mem::take(&mut book.has_answered), false, 0);
        for entry in book.running.values_mut() {
            let chunks = entry.mark.chunks.load(Ordering::Relaxed);
            if chunks != entry.seen {
                (entry.seen, entry.silent_beats, has_moved) = (chunks, 0, true);
            } else if entry.mark.is_held_back.load(Ordering::Relaxed) {
                entry.silent_beats = 0;
            } else {
                entry.silent_beats += 1;
                could_speak = true;
                longest = longest.max(entry.silent_beats);
            }
        }
        book.silent_beats = if has_moved || !could_speak { 0 } else { book.silent_beats + 1 };
        book.longest_beats = longest;
    }

    /// Returns how many requests run, for how long none of them had a token, and for how long the slowest had none.
    pub(crate) fn silence(&self) -> (usize, u64, u64) {
        let book = lock(&self.book);
        (book.running.len(), book.silent_beats * BEAT.as_secs(), book.longest_beats * BEAT.as_secs())
    }

    /// Returns why this worker is not able to serve; `None` while the work goes on.
    pub(crate) fn trouble(&self) -> Option<String> {
        let (running, silent, _) = self.silence();
        let is_over = self.limit_seconds > 0.0 && silent as f64 >= self.limit_seconds;
        is_over.then(|| format!("{running} request(s), none of them has had a token for {silent} s"))
    }
}

/// One request while it runs.
#[derive(Debug)]
pub(crate) struct WatchedRequest {
    progress: Arc<Progress>,
    number: u64,
    mark: Arc<Mark>,
    is_answered: bool,
}

impl WatchedRequest {
    /// Counts a chunk.
    pub(crate) fn add(&self) {
        self.mark.chunks.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes whether the request waits for its caller.
    pub(crate) fn hold_back(&self, is_held_back: bool) {
        self.mark.is_held_back.store(is_held_back, Ordering::Relaxed);
    }

    /// Notes that the request ended by itself, and not because its caller gave up.
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for WatchedRequest {
    fn drop(&mut self) {
        let mut book = lock(&self.progress.book);
        book.running.remove(&self.number);
        book.has_answered |= self.is_answered;
        if book.running.is_empty() {
            (book.has_answered, book.silent_beats, book.longest_beats) = (false, 0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_that_of_all_requests_that_could_speak() {
        let progress = Progress::new(2.0);
        let (stuck, moving) = (progress.enter(), progress.enter());
        for _ in 0..5 {
            moving.add();
            progress.beat();
        }
        assert_eq!(progress.silence(), (2, 0, 5));
        assert_eq!(progress.trouble(), None);
        progress.beat();
        progress.beat();
        assert_eq!(progress.trouble().as_deref(), Some("2 request(s), none of them has had a token for 2 s"));
        moving.answered();
        progress.beat();
        assert_eq!(progress.trouble(), None);
        stuck.hold_back(true);
        for _ in 0..5 {
            progress.beat();
        }
        assert_eq!(progress.silence(), (1, 0, 0));
        stuck.hold_back(false);
        for _ in 0..5 {
            progress.beat();
        }
        assert!(progress.trouble().is_some());
        drop(stuck);
        assert_eq!(progress.silence(), (0, 0, 0));
    }

    #[test]
    fn without_a_limit_there_is_no_trouble() {
        let progress = Progress::new(0.0);
        let _stuck = progress.enter();
        progress.beat();
        assert_eq!(progress.trouble(), None);
        assert_eq!(progress.silence(), (1, 1, 1));
    }
}
