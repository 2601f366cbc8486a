//! [`KernelsError`]: why no model can be computed on this machine, and what to do about it.

use std::fmt;
use std::path::PathBuf;

/// Why there are no kernels for this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelsError {
    /// They were compiled for another processor, with these instructions.
    Processor(String),
    /// There is no folder with libraries; this one was looked for.
    NoFolder(PathBuf),
    /// A folder or a library that others than the owner of the program, or root, may write to.
    Untrusted(PathBuf),
    /// A folder, a library or the program itself that cannot be read, and why.
    Unreadable(PathBuf, String),
    /// A library that the program is linked with is not the one that it was built with, and why not.
    OtherBuild(PathBuf, String),
    /// None of the libraries in a folder has kernels for this processor, and why not.
    Unsupported(PathBuf, String),
}

impl KernelsError {
    /// Returns what is wrong.
    #[must_use]
    pub fn problem(&self) -> String {
        match self {
            Self::Processor(missing) => {
                format!("this processor lacks {missing}, for which this program was compiled")
            }
            Self::NoFolder(folder) => format!(
                "the libraries of llama.cpp are missing: there are none in {}",
                folder.display()
            ),
            Self::Untrusted(path) => format!(
                "{} may be changed by others than the owner of this program, so no library is loaded from there",
                path.display()
            ),
            Self::Unreadable(path, why) => format!("{} cannot be read ({why})", path.display()),
            Self::OtherBuild(path, why) => format!(
                "{} is not the library that this program was built with ({why})",
                path.display()
            ),
            Self::Unsupported(folder, why) => format!(
                "no library in {} has kernels for this processor ({why})",
                folder.display()
            ),
        }
    }

    /// Returns what to do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Processor(_) => {
                "build it on this machine with `cargo xtask serve`, or use another machine".into()
            }
            Self::NoFolder(_) => {
                "unpack the whole archive, and keep its folders bin and lib beside each other".into()
            }
            Self::Untrusted(path) => format!(
                "run `chmod go-w {0}`, let {0} belong to root or to whom the program belongs, and start the program anew",
                path.display()
            ),
            Self::Unreadable(..) => "check its permissions, and start the program anew".into(),
            Self::OtherBuild(..) => {
                "unpack the whole archive again, the program with its libraries, and restart what was running meanwhile".into()
            }
            Self::Unsupported(..) => {
                "unpack the whole archive again, which has a library for every processor of this kind, and start the \
                 program anew"
                    .into()
            }
        }
    }
}

impl fmt::Display for KernelsError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.problem(), self.remedy())
    }
}

impl std::error::Error for KernelsError {}
