//! Checks each chunk that a function outputs against the function's spec and against what its caller requested.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::limits;
use crate::meta::Meta;
use crate::name::{Mime, Name, Port};
use crate::spec::Spec;
use crate::want::Want;

/// The state of a run's outputs so far.
pub(super) struct OutputTracker {
    name: Name,
    /// `None` for a node, which has no spec.
    spec: Option<Arc<Spec>>,
    want: Want,
    lanes: SmallVec<[OutputLane; 2]>,
    /// The index of the lane of the chunk before, which is nearly always that of the next one.
    last: usize,
}

/// What is known of one port and choice: its chunks have consecutive parts, each of one mimetype (KE-113).
struct OutputLane {
    port: Port,
    choice: u32,
    part: u32,
    mime: Mime,
    /// Whether the spec allows more than one part.
    many: bool,
    /// Whether the caller requested the port.
    wanted: bool,
}

impl OutputTracker {
    pub(super) fn new(name: Name, spec: Option<Arc<Spec>>, want: Want) -> Self {
        Self {
            name,
            spec,
            want,
            lanes: SmallVec::new(),
            last: 0,
        }
    }

    /// Checks a chunk. Returns whether the caller requested it.
    pub(super) fn admit(&mut self, chunk: &Chunk) -> Result<bool> {
        if chunk.data.len() > limits::CHUNK_BYTES_MAX {
            return Err(Error::Limit {
                name: "chunk_bytes_max",
                max: limits::CHUNK_BYTES_MAX as u64,
            });
        }
        let fits = |lane: &OutputLane| lane.choice == chunk.choice && lane.port == chunk.port;
        if !self.lanes.get(self.last).is_some_and(fits) {
            self.last = match self.lanes.iter().position(fits) {
                Some(found) => found,
                None if is_metadata(chunk) && !self.declares(chunk) => {
                    return Ok(self.want.ports.has(&chunk.port));
                }
                None => self.open(chunk)?,
            };
        }
        let lane = &self.lanes[self.last];
        let is_same = lane.part == chunk.part && lane.mime == chunk.mime;
        if is_same || chunk.part <= lane.part && is_metadata(chunk) {
            return Ok(lane.wanted);
        }
        self.next_part(chunk)
    }

    /// Adds a lane for the first chunk of a port and choice.
    fn open(&mut self, chunk: &Chunk) -> Result<usize> {
        if chunk.part != 0 {
            return Err(self.broken(format!("{:?} begins with part {}", chunk.port, chunk.part)));
        }
        // Readers keep state for each choice, so a peer must not choose how many there are.
        if chunk.choice >= limits::CHOICES_SEEN_MAX {
            return Err(self.broken(format!("choice {} is out of range", chunk.choice)));
        }
        // Looked up once for each port and choice, not for each chunk.
        let wanted = self.want.ports.has(&chunk.port);
        self.check_mime(chunk, wanted)?;
        let output = self.spec.as_ref().and_then(|spec| spec.output(&chunk.port));
        self.lanes.push(OutputLane {
            port: chunk.port.clone(),
            choice: chunk.choice,
            part: 0,
            mime: chunk.mime.clone(),
            many: output.is_none_or(|output| output.many),
            wanted,
        });
        Ok(self.lanes.len() - 1)
    }

    /// Checks a chunk whose part or mimetype differs from that of the chunk before it in its lane.
    fn next_part(&mut self, chunk: &Chunk) -> Result<bool> {
        let lane = &self.lanes[self.last];
        let (part, many, wanted) = (lane.part, lane.many, lane.wanted);
        if chunk.part == part {
            return Err(self.broken(format!(
                "the mimetype changes to {} within a part",
                chunk.mime
            )));
        }
        if !many || part.checked_add(1) != Some(chunk.part) {
            return Err(self.broken(format!("part {} follows part {part}", chunk.part)));
        }
        // A new part may have another mimetype (KE-113), so it is checked like a first one.
        self.check_mime(chunk, wanted)?;
        let lane = &mut self.lanes[self.last];
        lane.part = chunk.part;
        lane.mime = chunk.mime.clone();
        Ok(wanted)
    }

    /// Whether the port of a chunk is declared with its mimetype, as far as there are declarations.
    fn declares(&self, chunk: &Chunk) -> bool {
        let output = self.spec.as_ref().and_then(|spec| spec.output(&chunk.port));
        output.is_none_or(|output| output.mimes.iter().any(|mime| chunk.mime.matches(mime)))
    }

    fn check_mime(&self, chunk: &Chunk, wanted: bool) -> Result<()> {
        // Without declared outputs there is nothing to check: so have nodes, and functions that declare none (KE-142).
        let spec = self.spec.as_ref().filter(|spec| !spec.outputs.is_empty());
        if let Some(spec) = spec {
            let Some(output) = spec.output(&chunk.port) else {
                return Err(self.broken(format!("the port {:?} is not declared", chunk.port)));
            };
            if !output.mimes.iter().any(|mime| chunk.mime.matches(mime)) {
                return Err(self.broken(format!(
                    "{} on {:?} is not declared",
                    chunk.mime, chunk.port
                )));
            }
        }
        let taken = self.want.mimes.iter().any(|mime| chunk.mime.matches(mime));
        // Empty chunks only carry metadata and are not decoded.
        if wanted && !taken && !chunk.data.is_empty() {
            return Err(Error::Unsupported {
                function: self.name.clone(),
                produced: Box::new([chunk.mime.clone()]),
                wanted: self.want.mimes.clone().into(),
            });
        }
        Ok(())
    }

    /// Checks the end of the stream: a function whose spec says `finishes` gives each choice a finish reason (KE-136).
    pub(super) fn end(&self, meta: &Meta) -> Result<()> {
        let finishes = self.spec.as_ref().is_some_and(|spec| spec.finishes);
        let unfinished = |lane: &OutputLane| !meta.finish.contains_key(&lane.choice);
        // A choice without a chunk does not exist, and needs none.
        if finishes && self.lanes.iter().any(unfinished) {
            return Err(Error::Truncated {
                what: self.name.clone(),
            });
        }
        Ok(())
    }

    fn broken(&self, why: String) -> Error {
        Error::Protocol {
            peer: self.name.clone(),
            why,
        }
    }
}

/// Whether a chunk carries metadata of the run or nothing. Those of a remote function come on the main port as empty text,
/// whatever the type of that port is, and say nothing of it.
fn is_metadata(chunk: &Chunk) -> bool {
    chunk.data.is_empty() && chunk.mime == Mime::TEXT
}
