//! Variables that all forks of a request share (AI-951).

use alloc::string::String;
use alloc::vec::Vec;

#[cfg(any(target_arch = "wasm32", test))]
use crate::json::{Reader, from_hex, push_hex, push_string};

/// Variables that all forks of a request share; they exist as long as one of them does. Each write is atomic.
///
/// A host limits the size of a name (256 bytes) and of a value (1 MiB), and how many there are (1,024); over a limit the
/// sequence fails.
#[derive(Clone, Copy, Debug)]
pub struct Vars;

/// A variable's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// 1 after the first write, one more after each.
    pub version: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Value {
    /// The bytes as text; what is not UTF-8 is replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// A write of a variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write<'w> {
    pub(crate) name: &'w str,
    pub(crate) value: &'w [u8],
    pub(crate) append: bool,
    pub(crate) when_version_is: Option<u64>,
}

/// What a variable command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Read(Value),
    Missing,
    Written(u64),
}

impl Vars {
    /// The value of a variable, if it was ever written.
    #[must_use]
    pub fn read(name: &str) -> Option<Value> {
        match crate::host::read_variable(name) {
            Reply::Read(value) => Some(value),
            Reply::Missing | Reply::Written(_) => None,
        }
    }

    /// Sets a variable. Returns its new version.
    pub fn write(name: &str, value: impl AsRef<[u8]>) -> u64 {
        unconditional(name, value.as_ref(), false)
    }

    /// Appends to a variable, which is empty before its first write. Returns its new version.
    pub fn append(name: &str, value: impl AsRef<[u8]>) -> u64 {
        unconditional(name, value.as_ref(), true)
    }

    /// Sets a variable if nobody has written it since `version`. Returns its new version.
    ///
    /// # Errors
    /// It has another version; the error is its value, or `None` if it does not exist.
    pub fn replace(
        name: &str,
        version: u64,
        value: impl AsRef<[u8]>,
    ) -> Result<u64, Option<Value>> {
        let write = Write {
            name,
            value: value.as_ref(),
            append: false,
            when_version_is: Some(version),
        };
        match crate::host::write_variable(&write) {
            Reply::Written(version) => Ok(version),
            Reply::Read(value) => Err(Some(value)),
            Reply::Missing => Err(None),
        }
    }

    /// Sets a variable to a function of its value, again and again until no other fork wrote it meanwhile. A variable that
    /// does not exist is empty. Returns the value that was set.
    pub fn update(name: &str, change: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
        loop {
            let Some(value) = Self::read(name) else {
                // Appending nothing creates it and loses no write of another fork.
                Self::append(name, b"");
                continue;
            };
            let changed = change(&value.bytes);
            if Self::replace(name, value.version, &changed).is_ok() {
                return changed;
            }
        }
    }
}

fn unconditional(name: &str, value: &[u8], append: bool) -> u64 {
    let write = Write {
        name,
        value,
        append,
        when_version_is: None,
    };
    match crate::host::write_variable(&write) {
        Reply::Written(version) => version,
        Reply::Read(_) | Reply::Missing => panic!("the host did not write the variable {name}"),
    }
}

/// The command that reads a variable.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) fn read_command(name: &str) -> String {
    let mut json = String::from("{\"ReadVar\":{\"name\":");
    push_string(&mut json, name);
    json.push_str("}}");
    json
}

/// The command that writes a variable.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) fn write_command(write: &Write<'_>) -> String {
    let mut json = String::from("{\"WriteVar\":{\"name\":");
    push_string(&mut json, write.name);
    json.push_str(",\"value\":\"");
    push_hex(&mut json, write.value);
    json.push_str(if write.append {
        "\",\"op\":\"Append\""
    } else {
        "\",\"op\":\"Set\""
    });
    json.push_str(",\"when_version_is\":");
    match write.when_version_is {
        Some(version) => json.push_str(&alloc::format!("{version}")),
        None => json.push_str("null"),
    }
    json.push_str("}}");
    json
}

/// Reads the reply to a command; `None` if it has an unknown form.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) fn reply_of(json: &[u8]) -> Option<Reply> {
    let mut reply = None;
    let mut reader = Reader::new(json);
    let read = reader.members(&mut |reader, kind| {
        let (mut version, mut value) = (0, None);
        reader.members(&mut |reader, name| {
            match name {
                "version" => version = reader.number()?,
                "value" => value = Some(reader.string()?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        reply = match (kind, value) {
            ("WriteVar", _) => Some(Reply::Written(version)),
            ("VariableMissing", _) => Some(Reply::Missing),
            ("ReadVar", Some(hex)) => {
                from_hex(&hex).map(|bytes| Reply::Read(Value { version, bytes }))
            }
            _ => None,
        };
        Ok(())
    });
    read.ok().and(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AI-951
    #[test]
    fn ai_951_commands_and_replies_are_those_of_the_abi() {
        let mut write = Write {
            name: "a\"b",
            value: &[0, 0xab],
            append: true,
            when_version_is: None,
        };
        assert_eq!(
            write_command(&write),
            r#"{"WriteVar":{"name":"a\"b","value":"00ab","op":"Append","when_version_is":null}}"#
        );
        write.append = false;
        write.when_version_is = Some(3);
        assert_eq!(
            write_command(&write),
            r#"{"WriteVar":{"name":"a\"b","value":"00ab","op":"Set","when_version_is":3}}"#
        );
        assert_eq!(read_command("n"), r#"{"ReadVar":{"name":"n"}}"#);
        assert_eq!(
            reply_of(br#"{"WriteVar":{"version":2}}"#),
            Some(Reply::Written(2))
        );
        assert_eq!(reply_of(br#"{"VariableMissing":{}}"#), Some(Reply::Missing));
        let value = Value {
            version: 7,
            bytes: vec![1, 2],
        };
        assert_eq!(
            reply_of(br#"{"ReadVar":{"version":7,"value":"0102"}}"#),
            Some(Reply::Read(value))
        );
        for bad in [
            &b"{}"[..],
            b"",
            br#"{"ReadVar":{"version":7}}"#,
            br#"{"ReadVar":{"version":7,"value":"0"}}"#,
        ] {
            assert_eq!(reply_of(bad), None);
        }
    }
}
