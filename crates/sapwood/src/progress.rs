//! A progress bar for long work, on terminals only.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

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
