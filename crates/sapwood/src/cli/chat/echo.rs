//! Switches terminal echo off while an answer is printed, so that typed text does not appear within it; the line
//! editor shows it afterwards.

use std::io::{IsTerminal, stdin};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// Disables echo until it is dropped.
pub(super) struct EchoOff(Option<Termios>);

impl EchoOff {
    /// Does nothing if standard input is no terminal.
    pub(super) fn begin() -> Self {
        if !stdin().is_terminal() {
            return Self(None);
        }
        let Ok(before) = tcgetattr(stdin()) else {
            return Self(None);
        };
        let mut quiet = before.clone();
        // Ctrl-C remains a signal.
        quiet
            .local_modes
            .remove(LocalModes::ECHO | LocalModes::ECHONL);
        let set = tcsetattr(stdin(), OptionalActions::Now, &quiet);
        Self(set.is_ok().then_some(before))
    }
}

impl Drop for EchoOff {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // Fails only if the terminal is closed, and then there is nothing to restore.
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}
