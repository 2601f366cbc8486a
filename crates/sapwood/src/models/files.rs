//! The files of a model: whether they are GGUF, and which ones belong together.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::failure::{CliError, Exit};

/// Reports a file that does not exist or is no model before anything starts.
///
/// # Errors
/// [`Exit::Model`].
pub(super) fn look_at(name: &str, which: &str, path: &Path) -> Result<(), CliError> {
    is_gguf(path).map_err(|why| {
        let path = path.display();
        let what = format!("cannot load the model `{name}`: {which}{path}: {why}");
        CliError::exit(Exit::Model, what)
    })
}

/// Whether a file begins with the magic of GGUF.
///
/// # Errors
/// The reason if it does not, for people.
pub(crate) fn is_gguf(path: &Path) -> Result<(), String> {
    let mut magic = [0; 4];
    // Four bytes are enough to detect the usual mistakes: a directory, a web page, a model in another format.
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    match read {
        Ok(()) if &magic == b"GGUF" => Ok(()),
        Ok(()) => Err(NO_GGUF.into()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(NO_GGUF.into()),
        Err(error) => Err(error.to_string()),
    }
}

const NO_GGUF: &str = "it is not a GGUF file";

/// The files of a model that is split into parts, `NAME-00001-of-00003.gguf` and so on, from the first; else the file alone.
#[cfg(any(feature = "embedded", test))]
pub(crate) fn parts(first: std::path::PathBuf) -> Vec<std::path::PathBuf> {
    let split = || {
        let name = first.file_name()?.to_str()?;
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let name = rest.strip_suffix("-00001")?;
        let count = count
            .parse()
            .ok()
            .filter(|count| (1..=PARTS_MAX).contains(count))?;
        let part =
            |number: u32| first.with_file_name(format!("{name}-{number:05}-of-{count:05}.gguf"));
        Some((1..=count).map(part).collect())
    };
    split().unwrap_or_else(|| vec![first])
}

/// More are no model's.
#[cfg(any(feature = "embedded", test))]
const PARTS_MAX: u32 = 1000;
