//! `sapwood controller new`: a folder with a controller in Rust that builds.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use super::sdk;
use crate::failure::{CliError, Exit};
use crate::output;

/// The files, with `{name}` for the name of the crate.
const FILES: [(&str, &str); 3] = [
    (
        "Cargo.toml",
        include_str!("../controller_template/Cargo.toml.in"),
    ),
    (
        "src/lib.rs",
        include_str!("../controller_template/lib.rs.in"),
    ),
    (
        "README.md",
        include_str!("../controller_template/README.md.in"),
    ),
];

/// The folder of the SDK within a project.
const SDK: &str = "sapwood-guest";

/// Writes the folder `name`. Nothing that exists is overwritten.
///
/// # Errors
/// [`Exit::Usage`] if the name is no name of a crate or the folder exists.
pub(super) fn create(name: &str) -> Result<Exit, CliError> {
    let folder = Path::new(name);
    let crate_name = folder
        .file_name()
        .and_then(|name| name.to_str())
        .filter(|name| is_crate_name(name));
    let Some(crate_name) = crate_name else {
        return Err(CliError::usage(format!(
            "{name}: a name begins with a letter, and has letters, digits, `-` and `_` alone"
        )));
    };
    let failed = |why: io::Error| CliError::usage(format!("{name}: {why}"));
    // Not `create_dir_all`: a folder that exists may hold somebody's work.
    fs::create_dir(folder).map_err(failed)?;
    for (path, text) in FILES {
        write(&folder.join(path), &text.replace("{name}", crate_name)).map_err(failed)?;
    }
    let sdk = folder.join(SDK);
    write(&sdk.join("Cargo.toml"), sdk::MANIFEST).map_err(failed)?;
    for (path, text) in sdk::SOURCES {
        write(&sdk.join("src").join(path), text).map_err(failed)?;
    }
    output::message(format!(
        "Made {name}. Next:\n  cd {name}\n  rustup target add wasm32-unknown-unknown\n  sapwood controller build\n  sapwood controller upload target/wasm32-unknown-unknown/release/{}.wasm --tag {crate_name}\n  \
         sapwood controller run {crate_name} --prompt 'Hello'",
        crate_name.replace('-', "_")
    ));
    Ok(Exit::Ok)
}

/// Writes a new file, and the folders that it is in.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::File::create_new(path)?.write_all(text.as_bytes())
}

fn is_crate_name(name: &str) -> bool {
    let mut letters = name.chars();
    letters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|letter| letter.is_ascii_alphanumeric() || "-_".contains(letter))
        && name.len() <= 64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_made_once_and_never_overwritten() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("my-first");
        let name = folder.to_str().unwrap();
        assert!(matches!(create(name), Ok(Exit::Ok)));
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        assert!(manifest.contains("name = \"my-first\""), "{manifest}");
        assert!(!manifest.contains("{name}"), "{manifest}");
        assert!(folder.join(SDK).join("src/lib.rs").is_file());
        assert_eq!(create(name).unwrap_err().exit, Exit::Usage);
        for wrong in ["", "1st", "a b", "..", "ä"] {
            let name = parent.path().join(wrong);
            assert!(create(name.to_str().unwrap()).is_err(), "{wrong}");
        }
    }
}
