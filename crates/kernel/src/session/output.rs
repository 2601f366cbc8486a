//! Writes the chunks of a run as fragments of the action's output nodes (section 14 of the kernel page).
//!
//! ```text
//!   leaf:  chunk, chunk, … end                      an output with one answer of one part
//!   tree:  choice 0, choice 1, …                    n answers; each a leaf, or a tree if it may have many parts
//!          part 0, part 1, …                        one answer of many parts; each ends where the next begins
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use sapwood_proto::evergreen::{Metadata, msgpack};
use sapwood_proto::session::{ActionKey, NodeKey, SessionMachine, WriteError};
use sapwood_session::Live;

use super::wire;
use crate::chunk::Chunk;
use crate::meta::ChoiceFinish;
use crate::name::Port;
use crate::spec;

/// The listed outputs of one action.
pub(super) struct Outputs {
    action: ActionKey,
    list: Vec<ActionOutput>,
    shape: Arc<AnswerShape>,
}

/// The shape of an action's answers, known once its config has been read, which is before the first chunk.
#[derive(Debug, Default)]
pub(super) struct AnswerShape {
    /// The number of answers if they are a tree; 0 for a single one.
    answers: AtomicU32,
}

impl AnswerShape {
    /// A tree of so many answers, at first.
    pub(super) fn set_tree(&self, answers: u32) {
        self.answers.store(answers, Ordering::Relaxed);
    }

    /// The number of answers that are announced; `None` if there is only one, in a leaf.
    fn tree(&self) -> Option<u32> {
        match self.answers.load(Ordering::Relaxed) {
            0 => None,
            answers => Some(answers),
        }
    }
}

struct ActionOutput {
    port: Port,
    /// The mimetype of an output without any chunk (EV-404).
    mime: ByteString,
    many: bool,
    top: OpenNode,
}

/// A node that is being written.
struct OpenNode {
    node: NodeKey,
    shape: OutputShape,
    begun: PartialJson,
}

/// The start of a JSON value whose end has not arrived (EV-722).
#[derive(Default)]
struct PartialJson {
    /// It contains no line feed between calls, so new bytes are searched once, however long a value is.
    bytes: BytesMut,
    /// Number of searched bytes.
    #[cfg(test)]
    searched: usize,
}

impl PartialJson {
    /// Appends bytes. Returns the end of the last complete line, if there is one. Only the new bytes are searched:
    /// otherwise a value in many small pieces would be searched from its start for each of them.
    fn push(&mut self, data: &[u8]) -> Option<usize> {
        let before = self.bytes.len();
        self.bytes.extend_from_slice(data);
        #[cfg(test)]
        {
            self.searched += data.len();
        }
        // Backwards, because only the last line end matters: everything before it is complete.
        let newline = data.iter().rposition(|&byte| byte == b'\n');
        newline.map(|at| before + at + 1)
    }
}

enum OutputShape {
    /// Nothing is written yet.
    Open,
    /// A leaf and what it is.
    Leaf(Arc<Metadata>),
    /// One child per answer.
    Choices(Vec<OpenNode>),
    /// One child per part; only the last is still open.
    Parts(Vec<OpenNode>),
    Ended,
}

type WrittenNode = Result<(), WriteError>;

impl Outputs {
    pub(super) const fn new(action: ActionKey, shape: Arc<AnswerShape>) -> Self {
        Self {
            action,
            list: Vec::new(),
            shape,
        }
    }

    /// Binds `output` of a function to `node`.
    pub(super) fn bind(&mut self, output: &spec::OutputSpec, node: NodeKey) {
        // A pattern such as `text/*` is no mimetype, so it cannot go on the wire.
        let mime = output
            .mimes
            .iter()
            .find(|mime| !mime.as_str().contains('*'));
        self.list.push(ActionOutput {
            port: output.port.clone(),
            mime: mime
                .map_or("application/octet-stream", |mime| mime.as_str())
                .into(),
            many: output.many,
            top: OpenNode::new(node),
        });
    }

    /// The ports that are listed.
    pub(super) fn ports(&self) -> impl Iterator<Item = &Port> {
        self.list.iter().map(|output| &output.port)
    }

    /// Whether `port` is listed and nothing has been written to it.
    pub(super) fn is_unwritten(&self, port: &str) -> bool {
        let mut unwritten = self
            .list
            .iter()
            .filter(|output| matches!(output.top.shape, OutputShape::Open));
        unwritten.any(|output| output.port == *port)
    }

    /// Writes a chunk where it belongs; one for a port that is not listed is dropped (EV-506).
    pub(super) fn write(&mut self, live: &mut Live, chunk: &Chunk) -> WrittenNode {
        let tree = self.shape.tree();
        let Some(output) = self
            .list
            .iter_mut()
            .find(|output| output.port == chunk.port)
        else {
            return Ok(());
        };
        let flat = live.dialect().needs_flat_outputs();
        let mut pen = OutputWriter::new(live, self.action);
        if flat {
            return output.write_flat(&mut pen, chunk, tree);
        }
        output.write(&mut pen, chunk, tree)
    }

    /// Writes the whole of a port to which nothing has been written, and ends it. Ignores the room of the outbound
    /// queue: this data is only known at the end.
    pub(super) fn write_last(&mut self, live: &mut Live, chunk: &Chunk) -> WrittenNode {
        let output = self
            .list
            .iter_mut()
            .find(|output| output.port == chunk.port);
        let Some(output) = output.filter(|output| matches!(output.top.shape, OutputShape::Open))
        else {
            return Ok(());
        };
        // Marked before the write: if it fails, `finish` must not try to end the node once more.
        output.top.shape = OutputShape::Ended;
        let metadata = Arc::new(wire::metadata(chunk));
        live.machine()
            .nodes()
            .end_with_data(output.top.node, &metadata, chunk.data.clone())
    }

    /// Marks the answers that ended at a token limit, so that a later reader knows that they may be continued (D-51).
    pub(super) fn note_cuts(&self, live: &mut Live, ends: &BTreeMap<u32, ChoiceFinish>) {
        let is_cut = |choice: usize| {
            let choice = u32::try_from(choice).unwrap_or(u32::MAX);
            ends.get(&choice) == Some(&ChoiceFinish::Length)
        };
        for output in &self.list {
            match &output.top.shape {
                OutputShape::Choices(answers) => {
                    let cut = answers
                        .iter()
                        .enumerate()
                        .filter(|(index, _)| is_cut(*index));
                    cut.for_each(|(_, answer)| answer.note_cut(live.machine()));
                }
                _ if is_cut(0) => output.top.note_cut(live.machine()),
                _ => {}
            }
        }
    }

    /// Ends every output, including empty ones (EV-508).
    pub(super) fn finish(&mut self, live: &mut Live) -> WrittenNode {
        let mut pen = OutputWriter::new(live, self.action);
        self.list
            .iter_mut()
            .try_for_each(|output| output.top.finish(&mut pen, &output.mime))
    }
}

/// The session and the options that the nodes of one action are written with.
struct OutputWriter<'a> {
    session: &'a mut SessionMachine,
    action: ActionKey,
    /// Whether JSON values must not be split (EV-722).
    whole_json: bool,
}

impl<'a> OutputWriter<'a> {
    /// A writer for the client of the current connection, which may speak another dialect than the one before (EV-941).
    const fn new(live: &'a mut Live, action: ActionKey) -> Self {
        Self {
            whole_json: live.dialect().needs_whole_json(),
            session: live.machine(),
            action,
        }
    }
}

impl ActionOutput {
    /// Writes one leaf whatever the shape: each chunk is a fragment of its own, and names the answer that it belongs to
    /// (EV-733, EV-740).
    fn write_flat(
        &mut self,
        pen: &mut OutputWriter<'_>,
        chunk: &Chunk,
        tree: Option<u32>,
    ) -> WrittenNode {
        let mut metadata = wire::metadata(chunk);
        let is_plain = metadata.mimetype.starts_with("text/") || metadata.mimetype == DEFAULT_MIME;
        // An empty chunk with another mimetype can be an item, such as EndOfTurn (EV-301); of plain text it says
        // nothing.
        if chunk.data.is_empty() && is_plain {
            return Ok(());
        }
        let about_all = ABOUT_ALL.contains(&self.port.as_str());
        if !about_all && (tree.is_some() || chunk.choice > 0) {
            // A flat dialect has no trees, so the answer is named in an attribute of each fragment.
            let choice = msgpack::attribute("choice", chunk.choice.to_string());
            metadata.experimental.push(choice);
        }
        // A function sets the role only once.
        if let OutputShape::Leaf(before) = &self.top.shape
            && metadata.role.is_empty()
        {
            metadata.role = before.role.clone();
        }
        let metadata = match &self.top.shape {
            OutputShape::Leaf(before) if **before == metadata => Arc::clone(before),
            _ => Arc::new(metadata),
        };
        pen.session
            .nodes()
            .write_item(self.top.node, &metadata, chunk.data.clone())?;
        self.top.shape = OutputShape::Leaf(metadata);
        Ok(())
    }

    fn write(
        &mut self,
        pen: &mut OutputWriter<'_>,
        chunk: &Chunk,
        tree: Option<u32>,
    ) -> WrittenNode {
        let about_all = ABOUT_ALL.contains(&self.port.as_str());
        if matches!(self.top.shape, OutputShape::Open)
            && !about_all
            && (tree.is_some() || chunk.choice > 0)
        {
            self.top.shape = OutputShape::Choices(Vec::new());
            // All answers are announced at once, so that readers see them in index order, whichever writes first
            // (EV-604).
            self.top.grow(pen, tree.unwrap_or(1) as usize)?;
        }
        let many = self.many;
        if let OutputShape::Choices(_) = self.top.shape {
            // A controller that forks adds answers beyond those that were asked for (KE-613).
            self.top.grow(pen, chunk.choice as usize + 1)?;
        }
        match &mut self.top.shape {
            // `grow` has created the child.
            OutputShape::Choices(answers) => match answers.get_mut(chunk.choice as usize) {
                Some(answer) => answer.write(pen, chunk, many),
                None => Err(WriteError::Refused),
            },
            // A leaf holds one answer; a second answer comes too late to make it a tree.
            _ if chunk.choice > 0 && !about_all => Err(WriteError::Refused),
            _ => self.top.write(pen, chunk, many),
        }
    }
}

impl OpenNode {
    fn new(node: NodeKey) -> Self {
        Self {
            node,
            shape: OutputShape::Open,
            begun: PartialJson::default(),
        }
    }

    /// Marks the last leaf as truncated.
    fn note_cut(&self, session: &mut SessionMachine) {
        match &self.shape {
            OutputShape::Parts(parts) => parts.iter().for_each(|part| part.note_cut(session)),
            _ => session.nodes().note_cut(self.node),
        }
    }

    /// Adds children up to `count`, announced in one fragment before any of them is written.
    fn grow(&mut self, pen: &mut OutputWriter<'_>, count: usize) -> WrittenNode {
        let (OutputShape::Choices(children) | OutputShape::Parts(children)) = &mut self.shape
        else {
            return Err(WriteError::Refused);
        };
        let missing = count.saturating_sub(children.len());
        if missing == 0 {
            return Ok(());
        }
        let made = pen.session.nodes().grow(self.node, missing, pen.action)?;
        children.extend(made.into_iter().map(Self::new));
        Ok(())
    }

    fn write(&mut self, pen: &mut OutputWriter<'_>, chunk: &Chunk, many: bool) -> WrittenNode {
        if many && matches!(self.shape, OutputShape::Open) {
            self.shape = OutputShape::Parts(Vec::new());
        }
        match &mut self.shape {
            OutputShape::Parts(parts) => {
                let wanted = chunk.part as usize + 1;
                if wanted > parts.len() {
                    // Parts do not interleave (KE-113). The one before ends first, so that leaves are sent one after
                    // the other (EV-722).
                    if let Some(before) = parts.last_mut() {
                        before.finish(pen, &DEFAULT_MIME)?;
                    }
                    self.grow(pen, wanted)?;
                }
                let OutputShape::Parts(parts) = &mut self.shape else {
                    return Err(WriteError::Refused);
                };
                match parts.last_mut() {
                    Some(part) => part.write_leaf(pen, chunk),
                    None => Err(WriteError::Refused),
                }
            }
            _ => self.write_leaf(pen, chunk),
        }
    }

    fn write_leaf(&mut self, pen: &mut OutputWriter<'_>, chunk: &Chunk) -> WrittenNode {
        let metadata = match &self.shape {
            // Only the first chunk of a leaf can be empty and matter: it carries the metadata.
            OutputShape::Leaf(_) if chunk.data.is_empty() => return Ok(()),
            OutputShape::Leaf(metadata) => Arc::clone(metadata),
            OutputShape::Open => Arc::new(wire::metadata(chunk)),
            _ => return Err(WriteError::Refused),
        };
        // The mimetype is parsed last: few dialects need whole values, and this is done for each chunk.
        let data =
            if (pen.whole_json || !self.begun.bytes.is_empty()) && is_json(&metadata.mimetype) {
                // Bytes are buffered below. Checking for room first ensures that a retried write does not buffer them
                // twice.
                if !pen.session.nodes().has_room() {
                    // Waiting for room would not help a node that has ended, as when the deadline of its action has passed.
                    let ended = pen.session.is_complete(self.node);
                    return Err(if ended {
                        WriteError::Ended
                    } else {
                        WriteError::Full
                    });
                }
                self.whole_values(pen, &metadata.mimetype, &chunk.data)?
            } else {
                Some(chunk.data.clone())
            };
        if let Some(data) = data {
            pen.session.nodes().write(self.node, &metadata, data)?;
        }
        self.shape = OutputShape::Leaf(metadata);
        Ok(())
    }

    /// The part of JSON data that can be sent without splitting a value: whole lines, or nothing before the end.
    /// Buffered bytes count (EV-801).
    fn whole_values(
        &mut self,
        pen: &mut OutputWriter<'_>,
        mimetype: &str,
        data: &[u8],
    ) -> Result<Option<Bytes>, WriteError> {
        // Charged before it is buffered: without room the session ends, and nothing was taken.
        pen.session.calls().hold_aside(pen.action, data.len())?;
        let line = self.begun.push(data);
        let lines = mimetype.contains("ndjson") || mimetype.contains("jsonl");
        let len = self.begun.bytes.len();
        // A resumed connection may have a dialect in which values can be split (EV-941): what is buffered goes out at
        // once.
        let end = if len > WHOLE_BYTES_MAX || !pen.whole_json {
            Some(len)
        } else {
            line.filter(|_| lines)
        };
        Ok(end.map(|end| self.let_go(pen, end)))
    }

    /// Takes buffered bytes out and stops counting them.
    fn let_go(&mut self, pen: &mut OutputWriter<'_>, bytes: usize) -> Bytes {
        pen.session.calls().let_go_aside(pen.action, bytes);
        self.begun.bytes.split_to(bytes).freeze()
    }

    /// Ends this node and everything below it, children first.
    fn finish(&mut self, pen: &mut OutputWriter<'_>, mime: &ByteString) -> WrittenNode {
        match &mut self.shape {
            OutputShape::Ended => return Ok(()),
            OutputShape::Leaf(_) | OutputShape::Open => {}
            OutputShape::Choices(children) | OutputShape::Parts(children) => {
                children
                    .iter_mut()
                    .try_for_each(|child| child.finish(pen, mime))?;
            }
        }
        // Ended even if the write below fails: then the action fails, and the machine ends its outputs itself.
        let shape = std::mem::replace(&mut self.shape, OutputShape::Ended);
        if let (OutputShape::Leaf(metadata), false) = (shape, self.begun.bytes.is_empty()) {
            let rest = self.let_go(pen, self.begun.bytes.len());
            // Needs no room in the queue: an end must not wait, and the bytes are counted already.
            return pen
                .session
                .nodes()
                .end_with_data(self.node, &metadata, rest);
        }
        pen.session
            .nodes()
            .end(self.node, &Arc::new(Metadata::of(mime.clone())))
    }
}

fn is_json(mimetype: &str) -> bool {
    let kind = mimetype.split(';').next().unwrap_or_default().trim();
    kind.ends_with("json") || kind.ends_with("jsonl")
}

/// Outputs that describe all answers together: one leaf, however many answers there are.
const ABOUT_ALL: [&str; 4] = ["meta", "events", "progress", "controller_log"];
/// A larger JSON value is split all the same: it would not fit a fragment.
const WHOLE_BYTES_MAX: usize = 4 << 20;
const DEFAULT_MIME: ByteString = ByteString::from_static("application/octet-stream");

#[cfg(test)]
mod tests {
    use super::*;

    /// EV-722
    #[test]
    fn ev_722_buffered_json_is_searched_once_per_byte() {
        let mut begun = PartialJson::default();
        let chunk = [b'x'; 64];
        for _ in 0..32_768 {
            assert_eq!(begun.push(&chunk), None);
        }
        assert_eq!((begun.bytes.len(), begun.searched), (2 << 20, 2 << 20));
        assert_eq!(
            begun.push(b"a\nb\nc"),
            Some((2 << 20) + 4),
            "the last whole line"
        );
    }
}
