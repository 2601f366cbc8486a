//! A bar for things that take a while; nothing where standard error is no terminal.
//!
//! Owns: how it looks. Refuses to know: what takes so long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

/// The loading of one model, as a user sees it.
pub(crate) struct Bar {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

/// Stops a loading when dropped: whoever waited for it is gone.
pub(crate) struct Stopper(Arc<AtomicBool>);

impl Drop for Stopper {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Bar {
    /// A bar for the model `name`, and what stops its loading.
    pub(crate) fn new(name: &str) -> (Self, Stopper) {
        // Hidden by the library itself where standard error is no terminal.
        let bar = ProgressBar::new(1_000).with_message(format!("loading {name}"));
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} %") {
            bar.set_style(style);
        }
        let stop = Arc::new(AtomicBool::new(false));
        (
            Self {
                bar,
                stop: Arc::clone(&stop),
            },
            Stopper(stop),
        )
    }

    /// Shows the share done; answers whether to go on.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share between 0 and 1"
    )]
    pub(crate) fn show(&self, share: f32) -> bool {
        self.bar
            .set_position((share.clamp(0.0, 1.0) * 1_000.0) as u64);
        !self.stop.load(Ordering::Relaxed)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
