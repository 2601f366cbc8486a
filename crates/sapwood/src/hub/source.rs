//! The forms in which a model's file is named: a path, `file:PATH`, `hf:OWNER/REPO[@REVISION][:FILE or QUANTISATION]`, and
//! the URL of a GGUF file.

use std::fmt;
use std::path::{Path, PathBuf};

use sapwood_net::hub::{is_safe_path, web_url};
use sapwood_proto::secret::masked;
use url::{Position, Url};

/// Where a model's file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelSource {
    /// On this machine.
    File(PathBuf),
    /// In a repository of the hub.
    Hub(HubSource),
    /// On the web; its path ends in `.gguf`.
    Url(Url),
}

/// A model of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubSource {
    /// `OWNER/NAME`.
    pub(super) repo: String,
    /// A branch, tag or commit.
    pub(super) revision: String,
    pub(super) choice: ModelChoice,
}

/// Which of a repository's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelChoice {
    /// The usual quantisation.
    Usual,
    /// This file, or the split file that it is a part of.
    File(String),
    /// The file with this quantisation in its name; case does not matter.
    Quantisation(String),
}

impl ModelSource {
    /// Reads what stands for a path in the configuration or after `--model`.
    ///
    /// # Errors
    /// What is wrong, and how to write it.
    pub(crate) fn read(given: &Path) -> Result<Self, String> {
        // A path that is no text has no scheme either.
        let text = given.to_str().unwrap_or_default();
        if let Some(path) = text.strip_prefix("file:") {
            // Three slashes, as in a browser: the host between the first two and the third is this machine.
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err("write file:PATH".into());
            }
            return Ok(Self::File(path.into()));
        }
        if let Some(rest) = text.strip_prefix("hf:") {
            return HubSource::read(rest).map(Self::Hub);
        }
        if WEB.iter().any(|scheme| text.starts_with(scheme)) {
            return url(text).map(Self::Url);
        }
        Ok(Self::File(given.into()))
    }

    /// Whether a text begins as one of the forms does that are no plain path.
    pub(crate) fn has_scheme(text: &str) -> bool {
        ["file:", "hf:"]
            .iter()
            .chain(&WEB)
            .any(|scheme| text.starts_with(scheme))
    }

    /// The name under which the model is served unless another one is given: that of the file without its extension, or
    /// of the repository without its `-GGUF`.
    pub(crate) fn default_name(&self) -> String {
        match self {
            Self::File(path) => stem(&path.to_string_lossy()).to_owned(),
            Self::Url(url) => stem(&name(url)).to_owned(),
            Self::Hub(HubSource { repo, choice, .. }) => match choice {
                ModelChoice::File(path) => stem(path).to_owned(),
                _ => {
                    let name = repo.rsplit('/').next().unwrap_or_default();
                    let at = name.len().saturating_sub(SUFFIX.len());
                    // `get`, because the border may be within a character.
                    match (name.get(..at), name.get(at..)) {
                        (Some(short), Some(end))
                            if end.eq_ignore_ascii_case(SUFFIX) && !short.is_empty() =>
                        {
                            short.to_owned()
                        }
                        _ => name.to_owned(),
                    }
                }
            },
        }
    }
}

impl HubSource {
    /// Reads what follows `hf:`.
    fn read(text: &str) -> Result<Self, String> {
        let (place, choice) = match text.split_once(':') {
            Some((place, choice)) => (place, Some(choice)),
            None => (text, None),
        };
        let (repo, revision) = place.split_once('@').unwrap_or((place, MAIN));
        let is_repo = repo
            .split_once('/')
            .is_some_and(|(owner, name)| is_word(owner) && is_word(name));
        if !is_repo || !is_revision(revision) {
            return Err(HOW.into());
        }
        let choice = match choice {
            None => ModelChoice::Usual,
            Some(path) if is_gguf(path) && is_safe_path(path) => ModelChoice::File(path.into()),
            Some(name) if is_word(name) && !is_gguf(name) => ModelChoice::Quantisation(name.into()),
            Some(_) => return Err(HOW.into()),
        };
        Ok(Self {
            repo: repo.into(),
            revision: revision.into(),
            choice,
        })
    }

    /// The repository and its revision, without the choice.
    pub(super) fn place(&self) -> String {
        match self.revision.as_str() {
            MAIN => format!("hf:{}", self.repo),
            revision => format!("hf:{}@{revision}", self.repo),
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Hub(hub) => match &hub.choice {
                ModelChoice::Usual => f.write_str(&hub.place()),
                ModelChoice::File(choice) | ModelChoice::Quantisation(choice) => {
                    write!(f, "{}:{choice}", hub.place())
                }
            },
            // A query may have a signature in it, which is a key for whoever sees it.
            Self::Url(url) => f.write_str(&masked(url.as_str())),
        }
    }
}

/// The URL of a GGUF file.
fn url(text: &str) -> Result<Url, String> {
    let mut url = web_url(text).map_err(|why| why.to_string())?;
    url.set_fragment(None);
    if !is_gguf(url.path()) {
        return Err("the path of its URL must end in .gguf".into());
    }
    let path = url.path().trim_start_matches('/');
    if !is_safe_path(path) {
        return Err("its URL has a path that cannot be the name of a file".into());
    }
    Ok(url)
}

/// The file name in a URL, decoded if that is a file name too.
fn name(url: &Url) -> String {
    let last = url.path().rsplit('/').next().unwrap_or_default();
    let decoded = percent_encoding::percent_decode_str(last).decode_utf8();
    match decoded {
        Ok(decoded) if is_safe_path(&decoded) => decoded.into_owned(),
        _ => last.to_owned(),
    }
}

/// `HOST[:PORT]` of a URL, as the name of a folder.
pub(super) fn host(url: &Url) -> &str {
    &url[Position::BeforeHost..Position::AfterPort]
}

pub(super) fn is_gguf(path: &str) -> bool {
    // On bytes, which cannot be cut within a character.
    let bytes = path.as_bytes();
    let end = bytes.len().checked_sub(EXTENSION.len());
    end.is_some_and(|at| at > 0 && bytes[at..].eq_ignore_ascii_case(EXTENSION.as_bytes()))
}

/// The name of a file without its extension.
fn stem(path: &str) -> &str {
    let stem = Path::new(path).file_stem();
    stem.and_then(|stem| stem.to_str()).unwrap_or_default()
}

/// The names of owners, repositories and quantisations.
fn is_word(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=WORD_BYTES_MAX).contains(&text.len())
        && !text.starts_with('.')
        && text.bytes().all(is_inner)
}

fn is_revision(text: &str) -> bool {
    text.len() <= 2 * WORD_BYTES_MAX && text.split('/').all(is_word)
}

const HOW: &str = "write hf:OWNER/REPO, hf:OWNER/REPO:Q4_K_M for a quantisation, hf:OWNER/REPO:FILE.gguf for a file, and \
                   hf:OWNER/REPO@REVISION for a branch, tag or commit";
pub(super) const MAIN: &str = "main";
const SUFFIX: &str = "-gguf";
pub(super) const EXTENSION: &str = ".gguf";
const WEB: [&str; 2] = ["https://", "http://"];
/// The hub allows 96 bytes for a name.
const WORD_BYTES_MAX: usize = 96;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ModelSource, String> {
        ModelSource::read(Path::new(text))
    }

    #[test]
    fn a_source_is_read_and_shown() {
        for (text, name, shown) in [
            ("hf:o/r", "r", "hf:o/r"),
            ("hf:o/Some-1B-GGUF", "Some-1B", "hf:o/Some-1B-GGUF"),
            ("hf:o/-gguf", "-gguf", "hf:o/-gguf"),
            ("hf:o/r@main:Q4_K_M", "r", "hf:o/r:Q4_K_M"),
            (
                "hf:o/r@refs/pr/3:UD-Q4_K_XL",
                "r",
                "hf:o/r@refs/pr/3:UD-Q4_K_XL",
            ),
            ("hf:o/r:q/m-Q8_0.gguf", "m-Q8_0", "hf:o/r:q/m-Q8_0.gguf"),
            ("file:a/b.gguf", "b", "a/b.gguf"),
            ("file:///a/b.gguf", "b", "/a/b.gguf"),
            ("./hf:o/r", "hf:o", ""),
            (
                "https://h/a/b%20c.GGUF?sig=hush#x",
                "b c",
                "https://h/a/b%20c.GGUF?sig=***",
            ),
            ("http://h:1/b.gguf", "b", "http://h:1/b.gguf"),
        ] {
            let source = read(text).unwrap();
            if !shown.is_empty() {
                assert_eq!(source.default_name(), name, "{text}");
                assert_eq!(source.to_string(), shown, "{text}");
            } else {
                assert!(matches!(source, ModelSource::File(_)), "{text}");
            }
        }
    }

    #[test]
    fn a_source_that_names_no_file_is_refused() {
        for text in [
            "hf:",
            "hf:o",
            "hf:o/",
            "hf:/r",
            "hf:o/r/x",
            "hf:../r",
            "hf:o/..",
            "hf:o/r@",
            "hf:o/r@a/../b",
            "hf:o/r:",
            "hf:o/r:../m.gguf",
            "hf:o/r:a\u{1b}.gguf",
            "hf:o/r:.gguf",
            "hf:o/r:a b",
            "hf:o/r@x:y:z",
            "file:",
            "https://",
            "https://h/",
            "https://h/m.bin",
            "https://u:p@h/m.gguf",
            "https://h/.gguf/",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        // The parser of URLs has removed what leads upwards.
        let Ok(ModelSource::Url(url)) = read("https://h/a/../../%2e%2e/m.gguf") else {
            panic!("it is a URL");
        };
        assert_eq!(url.path(), "/m.gguf");
    }
}
