//! [`Scan`]: validates a module in one pass over its bytes, and notes what instrumentation and the ABI check need.
//!
//! Sizes that a stranger chooses are compared with their limits before anything is allocated for them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use wasmparser::{
    ConstExpr, ElementItems, ElementSectionReader, Encoding, Export, FuncToValidate,
    FuncValidatorAllocations, FunctionBody, GlobalSectionReader, Import, MemorySectionReader,
    Operator, OperatorsReader, Parser, Payload, TableSectionReader, TypeRef, ValType, ValidPayload,
    Validator, ValidatorResources, WasmFeatures, types::Types,
};

use super::{ModuleError, ModuleLimits};

/// What today's compilers emit by default, and a fork can copy (AI-603). Floats and the existence of reference types
/// are not proposals; they are switches of the validator.
pub(super) const FEATURES: WasmFeatures = WasmFeatures::FLOATS
    .union(WasmFeatures::GC_TYPES)
    .union(WasmFeatures::MUTABLE_GLOBAL)
    .union(WasmFeatures::SIGN_EXTENSION)
    .union(WasmFeatures::SATURATING_FLOAT_TO_INT)
    .union(WasmFeatures::BULK_MEMORY)
    .union(WasmFeatures::MULTI_VALUE)
    .union(WasmFeatures::SIMD)
    .union(WasmFeatures::REFERENCE_TYPES)
    .union(WasmFeatures::EXTENDED_CONST);

/// Imports of a module. There are about 60 functions to import, and no reason to import one often.
const IMPORTS_MAX: u32 = 1000;

/// Elements of all element segments together: as many as fill the tables many times over.
const ELEMENTS_MAX: u64 = 4_000_000;

/// Targets of one branch table, far above what the largest interpreters have.
const BRANCH_TARGETS_MAX: u32 = 100_000;

/// Reading the clock takes longer than validating an operator.
const OPERATORS_PER_CLOCK: u32 = 4096;

/// A segment that can be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Segment {
    /// A data segment, by index.
    Data(u32),
    /// An element segment, by index.
    Element(u32),
}

/// What was found in a valid module.
pub(super) struct Scan<'a> {
    pub(super) imports: Vec<Import<'a>>,
    pub(super) exports: Vec<Export<'a>>,
    /// Indices of mutable globals, and whether one of them holds a function reference.
    pub(super) mutable_globals: Vec<u32>,
    pub(super) mutable_funcref: bool,
    pub(super) globals: u32,
    /// For each table: whether it holds function references.
    pub(super) tables: Vec<bool>,
    pub(super) written_tables: BTreeSet<u32>,
    /// For each function: whether a reference to it can be made, by an element segment, a global or the code.
    pub(super) referenced: Vec<bool>,
    pub(super) start: Option<u32>,
    /// The segments that the code drops, each with its position in this list.
    pub(super) dropped: BTreeMap<Segment, u32>,
    /// For each function body: whether it drops a segment.
    pub(super) body_drops: Vec<bool>,
    limits: &'a ModuleLimits,
    elements: u64,
    /// Operators since the clock was read.
    operators: u32,
    deadline: Option<Instant>,
}

impl<'a> Scan<'a> {
    /// Validates `bytes`. Returns what was found, and the validator's types.
    pub(super) fn run(
        bytes: &'a [u8],
        limits: &'a ModuleLimits,
    ) -> Result<(Self, Types), ModuleError> {
        let mut scan = Self {
            imports: Vec::new(),
            exports: Vec::new(),
            mutable_globals: Vec::new(),
            mutable_funcref: false,
            globals: 0,
            tables: Vec::new(),
            written_tables: BTreeSet::new(),
            referenced: Vec::new(),
            start: None,
            dropped: BTreeMap::new(),
            body_drops: Vec::new(),
            limits,
            elements: 0,
            operators: 0,
            // None is too far away to matter.
            deadline: Instant::now().checked_add(limits.check_time),
        };
        let mut parser = Parser::new(0);
        parser.set_features(FEATURES);
        let mut validator = Validator::new_with_features(FEATURES);
        let mut allocations = FuncValidatorAllocations::default();
        for payload in parser.parse_all(bytes) {
            let payload = payload?;
            scan.limit(&payload)?;
            match validator.payload(&payload)? {
                ValidPayload::Func(function, body) => {
                    allocations = scan.function(function, &body, allocations)?;
                }
                ValidPayload::End(types) => return Ok((scan, types)),
                ValidPayload::Ok | ValidPayload::Parser(_) => scan.note(payload)?,
            }
        }
        Err(ModuleError::invalid("the module ends too early"))
    }

    /// Compares sizes with the limits, before the validator allocates for them.
    fn limit(&self, payload: &Payload<'a>) -> Result<(), ModuleError> {
        match payload {
            Payload::Version {
                encoding: Encoding::Component,
                ..
            } => Err(ModuleError::invalid("components are not supported yet")),
            Payload::ImportSection(section) if section.count() > IMPORTS_MAX => Err(
                ModuleError::invalid(format_args!("more than {IMPORTS_MAX} imports")),
            ),
            Payload::FunctionSection(section) if section.count() > self.limits.functions => {
                Err(ModuleError::invalid(format_args!(
                    "more than {} functions",
                    self.limits.functions
                )))
            }
            Payload::TableSection(section) => self.limit_tables(section),
            Payload::MemorySection(section) => self.limit_memories(section),
            _ => Ok(()),
        }
    }

    fn limit_tables(&self, section: &TableSectionReader<'a>) -> Result<(), ModuleError> {
        let limits = self.limits;
        if section.count() > limits.tables {
            let error = format!("more than {} tables", limits.tables);
            return Err(ModuleError::invalid(error));
        }
        for table in section.clone() {
            if table?.ty.initial > limits.table_elements {
                let error = format!("a table of more than {} elements", limits.table_elements);
                return Err(ModuleError::invalid(error));
            }
        }
        Ok(())
    }

    fn limit_memories(&self, section: &MemorySectionReader<'a>) -> Result<(), ModuleError> {
        if section.count() > 1 {
            return Err(ModuleError::invalid("more than one memory"));
        }
        for memory in section.clone() {
            let bytes = u128::from(memory?.initial) * u128::from(PAGE_BYTES);
            if bytes > u128::from(self.limits.memory_bytes) {
                return Err(ModuleError::invalid(format_args!(
                    "its memory begins with {bytes} bytes; an instance may have {}",
                    self.limits.memory_bytes
                )));
            }
        }
        Ok(())
    }

    /// Notes what a valid section has.
    fn note(&mut self, payload: Payload<'a>) -> Result<(), ModuleError> {
        match payload {
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    let import = import?;
                    if matches!(import.ty, TypeRef::Func(_)) {
                        self.referenced.push(false);
                    }
                    self.imports.push(import);
                }
            }
            Payload::FunctionSection(section) => {
                let functions = self.referenced.len() + section.count() as usize;
                self.referenced.resize(functions, false);
            }
            Payload::TableSection(section) => {
                for table in section {
                    self.tables.push(table?.ty.element_type.is_func_ref());
                }
            }
            Payload::GlobalSection(section) => self.note_globals(section)?,
            Payload::ExportSection(section) => {
                self.exports = section.into_iter().collect::<Result<_, _>>()?;
            }
            Payload::StartSection { func, .. } => self.start = Some(func),
            Payload::ElementSection(section) => self.note_elements(section)?,
            _ => {}
        }
        Ok(())
    }

    fn note_globals(&mut self, section: GlobalSectionReader<'a>) -> Result<(), ModuleError> {
        self.globals = section.count();
        for (index, global) in (0..).zip(section) {
            let global = global?;
            self.note_const_expr(&global.init_expr)?;
            if !global.ty.mutable {
                continue;
            }
            self.mutable_funcref |=
                matches!(global.ty.content_type, ValType::Ref(ty) if ty.is_func_ref());
            self.mutable_globals.push(index);
            if self.mutable_globals.len() > self.limits.mutable_globals as usize {
                let error = format!("more than {} mutable globals", self.limits.mutable_globals);
                return Err(ModuleError::invalid(error));
            }
        }
        Ok(())
    }

    fn note_elements(&mut self, section: ElementSectionReader<'a>) -> Result<(), ModuleError> {
        for element in section {
            let items = element?.items;
            let count = match &items {
                ElementItems::Functions(functions) => functions.count(),
                ElementItems::Expressions(_, expressions) => expressions.count(),
            };
            self.elements += u64::from(count);
            if self.elements > ELEMENTS_MAX {
                let error = format!("more than {ELEMENTS_MAX} elements in element segments");
                return Err(ModuleError::invalid(error));
            }
            match items {
                ElementItems::Functions(functions) => {
                    for function in functions {
                        self.note_reference(function?);
                    }
                }
                ElementItems::Expressions(_, expressions) => {
                    for expression in expressions {
                        self.note_const_expr(&expression?)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn note_const_expr(&mut self, expression: &ConstExpr<'a>) -> Result<(), ModuleError> {
        for operator in expression.get_operators_reader() {
            if let Operator::RefFunc { function_index } = operator? {
                self.note_reference(function_index);
            }
        }
        Ok(())
    }

    fn note_reference(&mut self, function: u32) {
        // Always there: the validator has checked the index.
        if let Some(referenced) = self.referenced.get_mut(function as usize) {
            *referenced = true;
        }
    }

    /// Validates a function and notes what it does, in the same pass over its code.
    fn function(
        &mut self,
        function: FuncToValidate<ValidatorResources>,
        body: &FunctionBody<'a>,
        allocations: FuncValidatorAllocations,
    ) -> Result<FuncValidatorAllocations, ModuleError> {
        let mut validator = function.into_validator(allocations);
        let mut reader = body.get_binary_reader();
        validator.read_locals(&mut reader)?;
        let mut operators = OperatorsReader::new(reader);
        let mut drops = false;
        while !operators.eof() {
            let (operator, offset) = operators.read_with_offset()?;
            self.limit_time(&operator)?;
            validator.op(offset, &operator)?;
            drops |= self.note_operator(&operator)?;
        }
        operators.finish()?;
        self.body_drops.push(drops);
        Ok(validator.into_allocations())
    }

    /// Keeps the time of validation bounded. Most operators take a constant time, but two bytes can call a function of 1,000
    /// parameters and 1,000 results in code that is never reached, and each target of a branch table is checked against as
    /// many values.
    fn limit_time(&mut self, operator: &Operator<'a>) -> Result<(), ModuleError> {
        let mut steps = 1;
        if let Operator::BrTable { targets } = operator {
            if targets.len() > BRANCH_TARGETS_MAX {
                return Err(ModuleError::invalid(format_args!(
                    "a branch table of more than {BRANCH_TARGETS_MAX} targets"
                )));
            }
            // Each target is checked like an operator of its own.
            steps += targets.len();
        }
        self.operators += steps;
        if self.operators < OPERATORS_PER_CLOCK {
            return Ok(());
        }
        self.operators = 0;
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(ModuleError::CompileTimeout {
                seconds: self.limits.check_time.as_secs(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns whether the operator drops a segment.
    fn note_operator(&mut self, operator: &Operator<'a>) -> Result<bool, ModuleError> {
        match *operator {
            Operator::DataDrop { data_index } => self.note_drop(Segment::Data(data_index))?,
            Operator::ElemDrop { elem_index } => self.note_drop(Segment::Element(elem_index))?,
            Operator::RefFunc { function_index } => {
                self.note_reference(function_index);
                return Ok(false);
            }
            Operator::TableSet { table }
            | Operator::TableGrow { table }
            | Operator::TableFill { table }
            | Operator::TableInit { table, .. }
            | Operator::TableCopy {
                dst_table: table, ..
            } => {
                self.written_tables.insert(table);
                return Ok(false);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn note_drop(&mut self, segment: Segment) -> Result<(), ModuleError> {
        // At most a limit of the validator, which is below 2^32.
        let next = self.dropped.len() as u32;
        self.dropped.entry(segment).or_insert(next);
        if next >= self.limits.dropped_segments && self.dropped.len() as u32 > next {
            let error = format!("drops more than {} segments", self.limits.dropped_segments);
            return Err(ModuleError::invalid(error));
        }
        Ok(())
    }
}

/// Bytes of a page of linear memory; another size needs a feature that is not accepted.
const PAGE_BYTES: u32 = 64 << 10;

impl From<wasmparser::Error> for ModuleError {
    fn from(error: wasmparser::Error) -> Self {
        Self::invalid(error)
    }
}

/// Validates a module without noting anything.
#[cfg(any(test, fuzzing))]
pub(super) fn validate(bytes: &[u8]) -> Result<(), ModuleError> {
    Validator::new_with_features(FEATURES).validate_all(bytes)?;
    Ok(())
}
