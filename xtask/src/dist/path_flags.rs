//! [`PathFlags`]: messages of what is shipped name no folders of who has built it.

use std::path::Path;
use std::process::Command;

use crate::root;
use crate::toolchain::Machine;

/// Flags of compilers, by the variable that they are read from: they replace folders in the names of source files, which panics of
/// Rust and assertions of llama.cpp show.
pub(super) struct PathFlags([(&'static str, String); 3]);

impl PathFlags {
    /// With the flags that the machine's variables have, and the folder of the registry.
    pub(super) fn of(machine: &Machine, registry: &Path) -> Self {
        // The last that matches counts: the sources of dependencies may be below this project's root.
        let folders = [(root(), "sapwood"), (registry.to_owned(), "registry")];
        let flags = [
            ("CFLAGS", "-ffile-prefix-map"),
            ("CXXFLAGS", "-ffile-prefix-map"),
            ("RUSTFLAGS", "--remap-path-prefix"),
        ];
        Self(flags.map(|(variable, flag)| {
            let given = machine.variable(variable);
            let mut value = given
                .and_then(|it| it.into_string().ok())
                .unwrap_or_default();
            for (folder, name) in &folders {
                value.push_str(&format!(" {flag}={}={name}", folder.display()));
            }
            (variable, value.trim().to_owned())
        }))
    }

    pub(super) fn apply(&self, command: &mut Command) {
        command.envs(self.0.iter().map(|(variable, value)| (variable, value)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_replaced_beside_the_flags_that_are_there() {
        let machine = tempfile::tempdir().unwrap();
        let machine = Machine::fake(machine.path(), &[("CFLAGS", "-g1".into())]);
        let flags = PathFlags::of(&machine, Path::new("/r/index"));
        let mut command = Command::new("cargo");
        flags.apply(&mut command);
        let set: Vec<_> = command.get_envs().collect();
        let root = root().display().to_string();
        for (variable, expected) in [
            (
                "CFLAGS",
                format!("-g1 -ffile-prefix-map={root}=sapwood -ffile-prefix-map=/r/index=registry"),
            ),
            (
                "CXXFLAGS",
                format!("-ffile-prefix-map={root}=sapwood -ffile-prefix-map=/r/index=registry"),
            ),
            (
                "RUSTFLAGS",
                format!("--remap-path-prefix={root}=sapwood --remap-path-prefix=/r/index=registry"),
            ),
        ] {
            let expected = (variable.as_ref(), Some(expected.as_ref()));
            assert!(set.contains(&expected), "{variable}: {set:?}");
        }
    }
}
