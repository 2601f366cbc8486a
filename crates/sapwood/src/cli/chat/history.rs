//! The history of questions, in a file of the user's state directory.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::output;

/// A line editor with a history.
pub(super) struct LineHistory {
    editor: DefaultEditor,
    /// `None` if there is no history file, or it failed.
    file: Option<PathBuf>,
}

/// The path of the user's file, if the system defines a state directory.
pub(super) fn file() -> Option<PathBuf> {
    let positions = etcetera::choose_base_strategy().ok()?;
    Some(positions.state_dir()?.join("sapwood").join("chat-history"))
}

impl LineHistory {
    /// An editor with the history of `file`, which is created if it does not exist.
    ///
    /// # Errors
    /// The terminal cannot be used. An unusable file is no error.
    pub(super) fn open(file: Option<PathBuf>) -> Result<Self, ReadlineError> {
        let config = Config::builder().max_history_size(LINES_MAX)?.build();
        let mut history = Self {
            editor: DefaultEditor::with_config(config)?,
            file,
        };
        history.file_to(|editor, file| {
            if let Some(folder) = file.parent() {
                DirBuilder::new()
                    .recursive(true)
                    // The editor creates the file itself with mode 0600.
                    .mode(0o700)
                    .create(folder)?;
            }
            match editor.load_history(file) {
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                    editor.save_history(file)
                }
                loaded => loaded,
            }
        });
        Ok(history)
    }

    /// Reads one line, and adds it to the history.
    ///
    /// # Errors
    /// Interrupted, the end, or the terminal cannot be used.
    pub(super) fn ask(&mut self) -> Result<String, ReadlineError> {
        let line = self.editor.readline("> ")?;
        self.keep(&line);
        Ok(line)
    }

    /// Written at once: a chat may end without a chance to write it later.
    fn keep(&mut self, line: &str) {
        if matches!(self.editor.add_history_entry(line), Ok(true)) {
            self.file_to(|editor, file| editor.append_history(file));
        }
    }

    fn file_to(
        &mut self,
        act: impl FnOnce(&mut DefaultEditor, &Path) -> Result<(), ReadlineError>,
    ) {
        let Some(file) = &self.file else {
            return;
        };
        if let Err(error) = act(&mut self.editor, file) {
            output::whisper(format!(
                "The history of questions is off: {}: {error}; with --no-history none is used",
                file.display()
            ));
            // Reported once, and not again for each line.
            self.file = None;
        }
    }
}

/// The oldest lines are dropped first.
const LINES_MAX: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_last_lines_are_stored_for_their_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state").join("chat-history");
        let mut first = LineHistory::open(Some(file.clone())).unwrap();
        for index in 0..LINES_MAX {
            first.keep(&format!("question {index}"));
        }
        let mut second = LineHistory::open(Some(file.clone())).unwrap();
        second.keep("the newest");
        let lines: Vec<String> = second.editor.history().iter().cloned().collect();
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(
            (&*lines[0], &*lines[LINES_MAX - 1]),
            ("question 1", "the newest")
        );
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("question 0\n") && text.ends_with("the newest\n"));
        for (path, mode) in [(file.as_path(), 0o600), (file.parent().unwrap(), 0o700)] {
            let found = std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(found & 0o777, mode, "{}", path.display());
        }
    }

    #[test]
    fn an_unusable_history_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let in_the_way = folder.path().join("state");
        std::fs::write(&in_the_way, "no folder").unwrap();
        for file in [None, Some(in_the_way.join("chat-history"))] {
            let mut history = LineHistory::open(file).unwrap();
            history.keep("a question");
            assert!(history.file.is_none());
            assert_eq!(history.editor.history().iter().count(), 1);
        }
    }
}
