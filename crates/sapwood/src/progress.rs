//! A progress bar for long work, on terminals only.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::plain::plain;

/// The progress bars on standard error, one set per process.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Standard error with bars: they are redrawn around written text.
#[derive(Debug)]
pub(crate) struct StderrBesideBars;

impl Write for StderrBesideBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Without a terminal there are no bars, and writing must not delay loading.
        if !io::stderr().is_terminal() {
            return io::stderr().write(bytes);
        }
        // Otherwise the line would be written into the middle of a bar.
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// The progress of loading one model.
pub(crate) struct LoadingBar {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

/// Stops a load when dropped, because its caller no longer waits for it.
pub(crate) struct Stopper(Arc<AtomicBool>);

impl Drop for Stopper {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl LoadingBar {
    /// A bar for the model `name`, and the handle that stops its load.
    pub(crate) fn new(name: &str) -> (Self, Stopper) {
        Self::among(&BARS, name)
    }

    fn among(bars: &MultiProgress, name: &str) -> (Self, Stopper) {
        // The library hides the bar itself if standard error is no terminal.
        let bar = bars.add(ProgressBar::new(1_000));
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} %") {
            bar.set_style(style);
        }
        bar.set_message(format!("loading {name}"));
        let stop = Arc::new(AtomicBool::new(false));
        (
            Self {
                bar,
                stop: Arc::clone(&stop),
            },
            Stopper(stop),
        )
    }

    /// Shows the share done; returns whether to continue.
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

impl Drop for LoadingBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The progress of downloading one file: a bar on a terminal, else a log line for each tenth.
pub(crate) struct DownloadBar {
    bar: ProgressBar,
    name: String,
    is_shown: bool,
    /// The tenths that were logged.
    tenths: AtomicU64,
}

impl DownloadBar {
    /// A bar for the file `name`.
    pub(crate) fn new(name: &str) -> Self {
        let bar = BARS.add(ProgressBar::no_length());
        let template =
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        // A name may come from another server.
        bar.set_message(plain(name).into_owned());
        Self {
            bar,
            name: name.to_owned(),
            is_shown: io::stderr().is_terminal(),
            tenths: AtomicU64::new(0),
        }
    }

    /// Sets the bytes of the whole file.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bar.set_length(bytes);
    }

    /// Shows that so many bytes are there already; the speed is that of the rest.
    pub(crate) fn begin_at(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.bar.reset_eta();
        let tenths = self.tenths_of(bytes);
        self.tenths.store(tenths, Ordering::Relaxed);
        if !self.is_shown {
            let total = self.bar.length().unwrap_or_default();
            tracing::info!(
                file = self.name,
                bytes = total,
                there = bytes,
                "downloading"
            );
        }
    }

    /// Shows that so many bytes are there.
    pub(crate) fn set(&self, bytes: u64) {
        self.bar.set_position(bytes);
        let tenths = self.tenths_of(bytes);
        // Lines stay in a log, so one for each chunk would be too many.
        if !self.is_shown && self.tenths.fetch_max(tenths, Ordering::Relaxed) < tenths {
            tracing::info!(file = self.name, percent = tenths * 10, "downloading");
        }
    }

    fn tenths_of(&self, bytes: u64) -> u64 {
        let total = self.bar.length().unwrap_or_default().max(1);
        // By division first: a size near the largest number must not overflow.
        (bytes / total.div_ceil(10)).min(10)
    }
}

impl Drop for DownloadBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    use indicatif::{ProgressDrawTarget, TermLike};

    /// A terminal that records the one line of the bar.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn shows(&self) -> String {
            self.0.lock().unwrap().trim().to_owned()
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            60
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bar_is_hidden_for_other_output_and_removed_at_the_end() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let bars = MultiProgress::with_draw_target(target);
        let (bar, stopper) = LoadingBar::among(&bars, "parrot");
        assert!(bar.show(0.5));
        assert!(screen.shows().starts_with("loading parrot"), "{screen:?}");
        bars.suspend(|| assert_eq!(screen.shows(), ""));
        assert!(screen.shows().ends_with("50 %"), "{screen:?}");
        drop(stopper);
        assert!(!bar.show(0.6), "the caller does not wait any more");
        drop(bar);
        assert_eq!(screen.shows(), "");
    }
}
