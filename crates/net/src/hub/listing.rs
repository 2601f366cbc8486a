//! The files of a repository, as a hub lists them.

use serde::Deserialize;

use super::error::HubError;

/// The files of a repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubListing {
    /// The commit that the revision stands for; files that are fetched by it belong together.
    pub commit: String,
    /// Its files.
    pub files: Vec<HubFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Its path in the repository, with `/`; [safe](is_safe_path).
    pub path: String,
    /// Its bytes, if the hub says so.
    pub bytes: Option<u64>,
    /// Its SHA-256 in hexadecimal digits, which the hub has for large files.
    pub sha256: Option<String>,
}

#[derive(Deserialize)]
struct WireListing {
    sha: String,
    #[serde(default)]
    siblings: Vec<WireFile>,
}

#[derive(Deserialize)]
struct WireFile {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    lfs: Option<WireLfs>,
}

#[derive(Deserialize)]
struct WireLfs {
    // Another route of the hub has the other name, and so may a mirror.
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

impl HubListing {
    /// Parses the answer of a hub.
    ///
    /// # Errors
    /// [`HubError::Protocol`].
    pub(super) fn read(body: &[u8]) -> Result<Self, HubError> {
        let read: WireListing = serde_json::from_slice(body)
            .map_err(|_| HubError::Protocol("it does not answer as a hub"))?;
        let commit = read.sha;
        let is_commit = !commit.is_empty()
            && commit.len() <= 64
            && commit.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_commit {
            return Err(HubError::Protocol("it names no commit"));
        }
        if read.siblings.len() > FILES_MAX {
            return Err(HubError::Protocol("the repository has too many files"));
        }
        let files = read.siblings.into_iter();
        let files = files.filter(|file| is_safe_path(&file.rfilename));
        let files = files.map(|file| {
            let sum = file.lfs.as_ref().map(|lfs| {
                sha256(&lfs.sha256).ok_or(HubError::Protocol("it lists an invalid checksum"))
            });
            Ok(HubFile {
                path: file.rfilename,
                bytes: file.lfs.map(|lfs| lfs.size).or(file.size),
                sha256: sum.transpose()?,
            })
        });
        Ok(Self {
            commit,
            files: files.collect::<Result<_, _>>()?,
        })
    }
}

/// Whether a relative path with `/` stays below the folder that it is joined to, on every system, and can be shown on a
/// terminal.
#[must_use]
pub fn is_safe_path(path: &str) -> bool {
    let is_plain = |c: char| is_shown(c) && !matches!(c, '\\' | ':');
    path.len() <= PATH_BYTES_MAX
        && path.chars().all(is_plain)
        && path.split('/').all(|part| {
            !part.is_empty() && part != "." && part != ".." && part.len() <= NAME_BYTES_MAX
        })
}

/// Whether a terminal or a log shows a character as it is: no control character, and none that changes the order in
/// which text is shown or breaks a line.
pub(super) fn is_shown(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// A SHA-256 in lower case, if these are its 64 hexadecimal digits.
pub(super) fn sha256(text: &str) -> Option<String> {
    let is_sum = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_sum.then(|| text.to_ascii_lowercase())
}

const FILES_MAX: usize = 100_000;
/// The maximum of bytes of a path.
const PATH_BYTES_MAX: usize = 1_024;
/// The maximum of bytes of each part of it: file systems take 255, and a cache appends to names.
const NAME_BYTES_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_has_names_sizes_and_checksums() {
        let sum = "Ab".repeat(32);
        let body = format!(
            r#"{{"sha": "abc123", "id": "o/r", "siblings": [
                {{"rfilename": "README.md", "size": 5, "blobId": "x"}},
                {{"rfilename": "q/m.gguf", "size": 9, "lfs": {{"sha256": "{sum}", "size": 9, "pointerSize": 1}}}},
                {{"rfilename": "tree.gguf", "lfs": {{"oid": "{sum}", "size": 7}}}},
                {{"rfilename": "../up.gguf"}}]}}"#
        );
        let listing = HubListing::read(body.as_bytes()).unwrap();
        assert_eq!(listing.commit, "abc123");
        let file = |path: &str, bytes, sum: Option<&str>| HubFile {
            path: path.into(),
            bytes: Some(bytes),
            sha256: sum.map(str::to_ascii_lowercase),
        };
        let expect = [
            file("README.md", 5, None),
            file("q/m.gguf", 9, Some(&sum)),
            file("tree.gguf", 7, Some(&sum)),
        ];
        assert_eq!(listing.files, expect);
        for body in [
            "",
            "[]",
            "{}",
            r#"{"sha": ""}"#,
            r#"{"sha": "../x"}"#,
            r#"{"sha": "a", "siblings": [{"rfilename": "m", "lfs": {"sha256": "00", "size": 1}}]}"#,
            r#"{"sha": "a", "siblings": [{"rfilename": "m", "size": -1}]}"#,
        ] {
            assert!(HubListing::read(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn a_path_stays_below_its_folder() {
        for path in ["m.gguf", "a/b-00001-of-00002.gguf", "...", "ü.gguf", "a b"] {
            assert!(is_safe_path(path), "{path}");
        }
        let (long, deep) = ("x".repeat(201), "a/".repeat(512) + "bc");
        for path in [
            "",
            "/etc/passwd",
            "..",
            "a/../b",
            "./a",
            "a//b",
            "a/",
            "a\\b",
            "C:x",
            "a\0b",
            "a\u{1b}[2Jb",
            "a\u{202e}b",
            "a\nb",
            &long,
            &deep,
        ] {
            assert!(!is_safe_path(path), "{path:?}");
        }
    }
}
