//! Rust code from our `.proto` files, committed so that no build needs a protobuf compiler.
//!
//! Owns: which messages go where: messages and the descriptor set into `proto`, the client stub into `net`, the
//! server trait into `server` (D-14). Refuses to know: what the messages mean.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use prost::Message;
use prost_types::FileDescriptorSet;

/// Files to compile, relative to [`INCLUDE`].
const SOURCES: &[&str] = &[
    "evergreen/v2/evergreen_service.proto",
    "google/rpc/error_details.proto",
    "google/rpc/status.proto",
    "sapwood/v1/config.proto",
];
const INCLUDE: &str = "crates/proto/proto";
const MESSAGES: &str = "crates/proto/src/generated";
const CLIENT: &str = "crates/net/src/generated";
const SERVER: &str = "crates/server/src/generated";
/// Where stubs find the messages.
const MESSAGE_PATH: &str = "::sapwood_proto::generated::evergreen::v2";

/// Options of `cargo xtask codegen`.
#[derive(Args)]
pub(crate) struct Options {
    /// Write nothing; fail if a committed file is stale.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Writes the generated files; with `check`, only compares and names the stale ones.
///
/// # Errors
/// A `.proto` file that does not compile, a file that cannot be read or written, or, with `check`, stale files.
pub(crate) fn run(options: &Options) -> Result<()> {
    let root = &crate::root();
    let files = generate(root)?;
    let mut stale = Vec::new();
    for (path, wanted) in &files {
        let path = root.join(path);
        if fs::read(&path).ok().as_ref() == Some(wanted) {
            continue;
        }
        if options.check {
            stale.push(path.display().to_string());
        } else {
            fs::write(&path, wanted).with_context(|| format!("write {}", path.display()))?;
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    bail!(
        "generated code is stale, run `cargo xtask codegen`: {}",
        stale.join(", ")
    )
}

/// Every generated file: its path below the root, and its content.
fn generate(root: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let descriptors = protox::compile(SOURCES, [root.join(INCLUDE)])?;
    let scratch = root.join("target/codegen");
    let mut files = BTreeMap::new();
    let mut take = |from: &Path, name: &str, to: PathBuf| -> Result<()> {
        let code = fs::read(from.join(name)).with_context(|| format!("read generated {name}"))?;
        files.insert(to.join(name), code);
        Ok(())
    };

    let out = fresh(&scratch.join("messages"))?;
    prost_build::Config::new()
        .bytes([".evergreen.v2.Chunk.data"])
        .btree_map(["."])
        .out_dir(&out)
        .compile_fds(without_services(&descriptors))?;
    for name in ["evergreen.v2.rs", "google.rpc.rs", "sapwood.v1.rs"] {
        take(&out, name, MESSAGES.into())?;
    }
    for (side, to) in [("client", CLIENT), ("server", SERVER)] {
        let out = fresh(&scratch.join(side))?;
        tonic_prost_build::configure()
            .build_client(side == "client")
            .build_server(side == "server")
            .extern_path(".evergreen.v2", MESSAGE_PATH)
            .out_dir(&out)
            .compile_fds(only_evergreen(&descriptors))?;
        take(&out, "evergreen.v2.rs", to.into())?;
    }
    files.insert(
        Path::new(MESSAGES).join("descriptors.binpb"),
        without_comments(descriptors).encode_to_vec(),
    );
    Ok(files)
}

fn fresh(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder.to_path_buf())
}

fn without_services(all: &FileDescriptorSet) -> FileDescriptorSet {
    let mut all = all.clone();
    for file in &mut all.file {
        file.service.clear();
    }
    all
}

/// Reflection needs names and types; comments would double the size of what every binary carries.
fn without_comments(mut all: FileDescriptorSet) -> FileDescriptorSet {
    for file in &mut all.file {
        file.source_code_info = None;
    }
    all
}

fn only_evergreen(all: &FileDescriptorSet) -> FileDescriptorSet {
    let mut all = all.clone();
    all.file.retain(|file| {
        !file.name().starts_with("sapwood/") && !file.name().starts_with("google/rpc/")
    });
    all
}
