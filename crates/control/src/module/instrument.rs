//! [`instrument`]: rewrites a valid module so that its instances can be forked exactly (AI-711, AI-712).
//!
//! What it adds goes to the end of the index spaces of types, functions and globals, so no index of the original
//! changes, and everything but the sections that grow is copied byte for byte:
//!
//! | Section | Change |
//! |---|---|
//! | type, function, code | one function more, if segments are dropped: it drops them again |
//! | global | one flag more for each segment that is ever dropped |
//! | export | reserved names for what a fork copies |
//! | start | removed; its function is exported |
//! | code | `data.drop` and `elem.drop` also set the segment's flag |
//! | custom | removed, but for function names, which backtraces show |

use wasm_encoder::{BlockType, Encode, ExportKind, Instruction, Module, RawSection, SectionId};
use wasmparser::{FunctionBody, Operator, Parser, Payload};

use super::scan::{FEATURES, Scan, Segment};
use super::{ForkLayout, ForkTable, ModuleError, RESERVED_PREFIX};

/// Returns the instrumented module and what a fork must copy.
pub(super) fn instrument(
    bytes: &[u8],
    scan: &Scan<'_>,
) -> Result<(Vec<u8>, ForkLayout), ModuleError> {
    let mut exports = AddedExports::default();
    let layout = exports.add_all(scan);
    let mut writer = Writer {
        module: Module::new(),
        scan,
        exports,
        has_globals: false,
        types: 0,
        code: Section::default(),
        bodies: 0,
    };
    let mut parser = Parser::new(0);
    parser.set_features(FEATURES);
    for payload in parser.parse_all(bytes) {
        writer.payload(bytes, &payload?)?;
    }
    Ok((writer.module.finish(), layout))
}

struct Writer<'a> {
    module: Module,
    scan: &'a Scan<'a>,
    exports: AddedExports,
    has_globals: bool,
    /// Types of the original.
    types: u32,
    /// The code section, while its functions come in; they are rewritten only if segments are dropped.
    code: Section,
    /// Function bodies seen.
    bodies: usize,
}

impl Writer<'_> {
    fn payload(&mut self, bytes: &[u8], payload: &Payload<'_>) -> Result<(), ModuleError> {
        match payload {
            Payload::StartSection { .. } => return Ok(()),
            Payload::CustomSection(custom) if custom.name() != "name" => return Ok(()),
            Payload::CodeSectionEntry(body) => return self.body(body),
            _ => {}
        }
        let Some((id, range)) = payload.as_section() else {
            return Ok(());
        };
        // The parser has read the section from these bytes.
        let original = bytes.get(range).unwrap_or_default();
        let drops = !self.scan.dropped.is_empty();
        match payload {
            Payload::TypeSection(section) if drops => {
                self.types = section.count();
                let mut section = Section::of(original, section.count());
                section.add(&[FUNCTION_TYPE, 0, 0]);
                self.section(id, &section);
            }
            Payload::FunctionSection(section) if drops => {
                let mut section = Section::of(original, section.count());
                section.add_encoded(self.types);
                self.section(id, &section);
            }
            Payload::GlobalSection(section) => {
                self.has_globals = true;
                self.globals(Section::of(original, section.count()));
            }
            Payload::ExportSection(section) => {
                // Sections have a fixed order, in which that of globals comes just before this one.
                if !self.has_globals && drops {
                    self.globals(Section::default());
                }
                let mut section = Section::of(original, section.count());
                section.append(&self.exports.0);
                self.section(id, &section);
            }
            Payload::CodeSectionStart { .. } if drops => {}
            _ => {
                self.module.section(&RawSection { id, data: original });
            }
        }
        Ok(())
    }

    fn globals(&mut self, mut section: Section) {
        for _ in &self.scan.dropped {
            section.add(FLAG);
        }
        self.section(SectionId::Global.into(), &section);
    }

    fn section(&mut self, id: u8, section: &Section) {
        let mut data = Vec::with_capacity(section.items.len() + COUNT_BYTES_MAX);
        section.count.encode(&mut data);
        data.extend_from_slice(&section.items);
        self.module.section(&RawSection { id, data: &data });
    }

    /// Rewrites one function, and writes the section after the last.
    fn body(&mut self, body: &FunctionBody<'_>) -> Result<(), ModuleError> {
        if self.scan.dropped.is_empty() {
            return Ok(());
        }
        // There is one entry for each body.
        if self.scan.body_drops.get(self.bodies) == Some(&true) {
            let rewritten = self.flag_drops(body)?;
            self.code.add_sized(&rewritten);
        } else {
            self.code.add_sized(body.as_bytes());
        }
        self.bodies += 1;
        if self.bodies == self.scan.body_drops.len() {
            let redrop = self.redrop();
            let mut code = std::mem::take(&mut self.code);
            code.add_sized(&redrop);
            self.section(SectionId::Code.into(), &code);
        }
        Ok(())
    }

    /// Copies a function's code, and sets the flag of a segment after each instruction that drops it.
    fn flag_drops(&self, body: &FunctionBody<'_>) -> Result<Vec<u8>, ModuleError> {
        let original = body.as_bytes();
        let start = body.range().start;
        let mut rewritten = Vec::with_capacity(original.len() * 2);
        let mut copied = 0;
        let mut operators = body.get_operators_reader()?;
        while !operators.eof() {
            let segment = match operators.read()? {
                Operator::DataDrop { data_index } => Segment::Data(data_index),
                Operator::ElemDrop { elem_index } => Segment::Element(elem_index),
                _ => continue,
            };
            let Some(position) = self.scan.dropped.get(&segment) else {
                continue;
            };
            let end = operators.original_position() - start;
            rewritten.extend_from_slice(original.get(copied..end).unwrap_or_default());
            copied = end;
            Instruction::I32Const(1).encode(&mut rewritten);
            Instruction::GlobalSet(self.scan.globals + position).encode(&mut rewritten);
        }
        rewritten.extend_from_slice(original.get(copied..).unwrap_or_default());
        Ok(rewritten)
    }

    /// The function that drops again what the flags say.
    fn redrop(&self) -> Vec<u8> {
        let no_locals = 0;
        let mut body = vec![no_locals];
        for (segment, position) in &self.scan.dropped {
            Instruction::GlobalGet(self.scan.globals + position).encode(&mut body);
            Instruction::If(BlockType::Empty).encode(&mut body);
            match segment {
                Segment::Data(index) => Instruction::DataDrop(*index).encode(&mut body),
                Segment::Element(index) => Instruction::ElemDrop(*index).encode(&mut body),
            }
            Instruction::End.encode(&mut body);
        }
        Instruction::End.encode(&mut body);
        body
    }
}

/// The exports to add.
#[derive(Default)]
struct AddedExports(Section);

impl AddedExports {
    fn add_all(&mut self, scan: &Scan<'_>) -> ForkLayout {
        let flags = scan.globals..scan.globals + scan.dropped.len() as u32;
        let globals = scan.mutable_globals.iter().copied().chain(flags);
        let references = scan.mutable_funcref
            || (0..)
                .zip(&scan.tables)
                .any(|(table, funcref)| *funcref && scan.written_tables.contains(&table));
        let functions = (0..)
            .zip(&scan.referenced)
            .filter(|(_, referenced)| references && **referenced);
        ForkLayout {
            globals: globals
                .map(|index| self.add(&format!("global_{index}"), ExportKind::Global, index))
                .collect(),
            tables: (0..scan.tables.len() as u32)
                .map(|index| ForkTable {
                    export: self.add(&format!("table_{index}"), ExportKind::Table, index),
                    written: scan.written_tables.contains(&index),
                })
                .collect(),
            functions: functions
                .map(|(index, _)| self.add(&format!("function_{index}"), ExportKind::Func, index))
                .collect(),
            start: scan
                .start
                .map(|index| self.add("start", ExportKind::Func, index)),
            redrop: (!scan.dropped.is_empty())
                .then(|| self.add("redrop", ExportKind::Func, scan.referenced.len() as u32)),
        }
    }

    fn add(&mut self, name: &str, kind: ExportKind, index: u32) -> String {
        let name = format!("{RESERVED_PREFIX}{name}");
        name.encode(&mut self.0.items);
        kind.encode(&mut self.0.items);
        self.0.add_encoded(index);
        name
    }
}

/// The items of a section, encoded, and their count.
#[derive(Default)]
struct Section {
    count: u32,
    items: Vec<u8>,
}

impl Section {
    /// The items of an existing section: what follows the count, whose encoding may be longer than needed.
    fn of(section: &[u8], count: u32) -> Self {
        let last = section.iter().position(|byte| byte & MORE == 0);
        let items = last.and_then(|last| section.get(last + 1..));
        Self {
            count,
            items: items.unwrap_or_default().to_vec(),
        }
    }

    fn add(&mut self, item: &[u8]) {
        self.count += 1;
        self.items.extend_from_slice(item);
    }

    fn add_encoded(&mut self, item: u32) {
        self.count += 1;
        item.encode(&mut self.items);
    }

    fn add_sized(&mut self, item: &[u8]) {
        self.count += 1;
        item.encode(&mut self.items);
    }

    fn append(&mut self, other: &Self) {
        self.count += other.count;
        self.items.extend_from_slice(&other.items);
    }
}

/// Marks a function type.
const FUNCTION_TYPE: u8 = 0x60;

/// `(global (mut i32) (i32.const 0))`.
const FLAG: &[u8] = &[0x7f, 0x01, 0x41, 0x00, 0x0b];

/// Set in each byte of a LEB128 number but the last.
const MORE: u8 = 0x80;

/// Bytes of the longest LEB128 number of 32 bits.
const COUNT_BYTES_MAX: usize = 5;
