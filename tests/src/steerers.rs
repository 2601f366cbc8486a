//! Controllers for tests: steerers whose argument is what they do, and a store in memory.
//!
//! They are for the scripted model's vocabulary of bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use sapwood_kernel::Steering;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Begun, Branch, ControllerStore, Mask, Mid, ModuleInfo, ModulePage, NamedVariable,
    OutsideWrite, Post, Pre, RequestVariables, Sample, Splice, Steer, SteerCall, SteerFailure,
    SteerRefusal, SteerSource, SteerUser, Steered, StepReport, StepWaker, TagInfo, TagPage, Token,
    UploadedModule, VariableWrite,
};

/// Bytes, BOS and EOS.
const VOCABULARY: usize = 258;

/// What happens in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Move {
    /// This byte is the only one allowed.
    Byte(u8),
    /// Forces these bytes.
    Force(Vec<u8>),
    /// Takes back so many tokens.
    Back(u32),
    /// Becomes so many sequences; each goes on with the rest.
    Fork(u32),
    /// The number of the branch is the only byte allowed.
    Index,
    Print(String),
    Write(String),
    /// Fails, with this message.
    Trap(String),
    /// Fails before the first step.
    Init(String),
    /// Any token is allowed, for ever.
    Free,
}

/// Reads moves, with `;` between them: `=ab` allows these bytes in turn, `+ab` forces them, `<2` takes back two tokens,
/// `k2` forks into two, `#` allows the digit of the branch, `p:text` prints, `w:name` writes a variable, `!why` and `?why`
/// fail in a step and before the first, `*` allows everything.
fn moves(text: &str) -> VecDeque<Move> {
    let mut all = VecDeque::new();
    for word in text.split(';').filter(|word| !word.is_empty()) {
        let (first, rest) = word.split_at(1);
        match first {
            "=" => all.extend(rest.bytes().map(Move::Byte)),
            "+" => all.push_back(Move::Force(rest.into())),
            "<" => all.push_back(Move::Back(rest.parse().unwrap())),
            "k" => all.push_back(Move::Fork(rest.parse().unwrap())),
            "#" => all.push_back(Move::Index),
            "p" => all.push_back(Move::Print(rest[1..].into())),
            "w" => all.push_back(Move::Write(rest[1..].into())),
            "!" => all.push_back(Move::Trap(rest.into())),
            "?" => all.push_back(Move::Init(rest.into())),
            "*" => all.push_back(Move::Free),
            other => panic!("no such move: {other}"),
        }
    }
    all
}

/// Plays moves, and stops after the last.
#[derive(Clone, Debug)]
struct Player {
    moves: VecDeque<Move>,
    /// Of the last fork.
    index: u32,
    report: StepReport,
}

impl Player {
    /// Plays what is to be reported before the next step.
    fn report_moves(&mut self) {
        while let Some(next) = self.moves.front() {
            match next {
                Move::Print(text) => self.report.logs.push_str(text),
                Move::Write(name) => self.report.storage.push(VariableWrite {
                    name: name.clone(),
                    value: vec![1],
                    append: false,
                    when_version_is: None,
                }),
                _ => return,
            }
            self.moves.pop_front();
        }
    }
}

impl Steer for Player {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        match self.moves.front() {
            Some(Move::Init(why)) => Err(failure(ErrorReason::INIT, why)),
            _ => Ok(Some(Begun::default())),
        }
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let mut fast_forward = Vec::new();
        loop {
            self.report_moves();
            match self.moves.front() {
                Some(Move::Force(bytes)) => {
                    fast_forward.extend(bytes.iter().map(|byte| Token::from(*byte)));
                    self.moves.pop_front();
                }
                Some(Move::Fork(count)) if fast_forward.is_empty() => {
                    let count = *count;
                    self.moves.pop_front();
                    return Ok(Some(Pre::Fork(count)));
                }
                None if fast_forward.is_empty() => return Ok(Some(Pre::Stop)),
                _ => return Ok(Some(Pre::Run { fast_forward })),
            }
        }
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let only = |byte: u8| {
            let mut mask = Mask::none(VOCABULARY);
            mask.allow(Token::from(byte));
            Branch::Sample(Sample {
                mask: Some(Arc::new(mask)),
                ..Sample::default()
            })
        };
        // A fork goes on in the step that it was made in, without another `pre`.
        self.report_moves();
        let branch = match self.moves.front() {
            Some(Move::Free) => return Ok(Some(Mid::One(Branch::Sample(Sample::default())))),
            Some(Move::Byte(byte)) => only(*byte),
            Some(Move::Index) => only(b'0' + u8::try_from(self.index).unwrap()),
            Some(Move::Back(tokens)) => Branch::Splice(Splice {
                backtrack: *tokens,
                tokens: Vec::new(),
            }),
            Some(Move::Trap(why)) => return Err(failure(ErrorReason::TRAP, why)),
            _ => return Ok(Some(Mid::Stop)),
        };
        self.moves.pop_front();
        Ok(Some(Mid::One(branch)))
    }

    fn post(&mut self, _appended: Appended<'_>) -> Steered<Post> {
        Ok(if self.moves.is_empty() {
            Post::Stop
        } else {
            Post::Continue
        })
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(Self {
            index,
            report: StepReport::default(),
            ..self.clone()
        }))
    }

    fn ends_at_eos(&self) -> bool {
        false
    }

    fn may_backtrack(&self) -> bool {
        self.moves.iter().any(|next| matches!(next, Move::Back(_)))
    }

    fn take_report(&mut self) -> Option<StepReport> {
        let report = std::mem::take(&mut self.report);
        (!report.is_empty()).then_some(report)
    }
}

fn failure(reason: ErrorReason, message: &str) -> SteerFailure {
    let message = message.to_owned();
    SteerFailure { reason, message }
}

fn refusal(code: Code, reason: ErrorReason, message: impl Into<String>) -> SteerRefusal {
    SteerRefusal {
        code,
        reason,
        message: message.into(),
    }
}

/// Allows every token until a variable exists, and then stops.
#[derive(Clone, Debug)]
struct UntilWritten {
    variable: String,
    variables: Arc<MemoryVariables>,
}

impl Steer for UntilWritten {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let fast_forward = Vec::new();
        Ok(Some(match self.variables.read(&self.variable) {
            Some(_) => Pre::Stop,
            None => Pre::Run { fast_forward },
        }))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        Ok(Some(Mid::One(Branch::Sample(Sample::default()))))
    }

    fn post(&mut self, _appended: Appended<'_>) -> Steered<Post> {
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(self.clone()))
    }

    fn ends_at_eos(&self) -> bool {
        false
    }
}

/// Variables of one request. Their names have at most eight bytes.
#[derive(Debug, Default)]
struct MemoryVariables(Mutex<BTreeMap<String, NamedVariable>>);

impl RequestVariables for MemoryVariables {
    fn list(&self) -> Vec<NamedVariable> {
        self.0.lock().unwrap().values().cloned().collect()
    }

    fn read(&self, name: &str) -> Option<NamedVariable> {
        self.0.lock().unwrap().get(name).cloned()
    }

    fn write(&self, write: &VariableWrite) -> OutsideWrite {
        if write.name.len() > 8 {
            return OutsideWrite::OverLimit("storage limit: name".to_owned());
        }
        let mut all = self.0.lock().unwrap();
        let version = all.get(&write.name).map(|it| it.version);
        if write.when_version_is.is_some() && write.when_version_is != version {
            return OutsideWrite::OtherVersion(version);
        }
        let written = NamedVariable {
            name: write.name.clone(),
            version: version.unwrap_or(0) + 1,
            value: Arc::new(write.value.clone()),
        };
        let version = written.version;
        all.insert(write.name.clone(), written);
        OutsideWrite::Written(version)
    }
}

/// `until` of the argument's variable.
fn until_written(call: SteerCall<'_>) -> Box<dyn Steer> {
    let variables = Arc::new(MemoryVariables::default());
    if let Some(sharer) = call.sharer {
        for (name, value) in sharer.take_initial() {
            variables.write(&VariableWrite {
                name,
                value,
                append: false,
                when_version_is: None,
            });
        }
        sharer.opened(Arc::clone(&variables) as _);
    }
    Box::new(UntilWritten {
        variable: call.arg.to_owned(),
        variables,
    })
}

/// Opens [`moves`](Steer) under the name `moves`; `until` runs until the variable of its argument is written; `private` is for callers with the scope `control`, and `bad` has a wrong
/// argument.
#[derive(Debug, Default)]
pub struct MoveSource {
    /// The users that have asked, and whether each is an admin and may control.
    pub users: Mutex<Vec<(String, bool, bool)>>,
}

impl SteerSource for MoveSource {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        let SteerUser {
            name,
            is_admin,
            may_control,
        } = call.user;
        let mut users = self.users.lock().unwrap();
        users.push((name.to_owned(), is_admin, may_control));
        match call.controller {
            "moves" => {}
            "until" => return Ok(until_written(call)),
            "private" if may_control => {}
            "private" => {
                let message = "only its owner may run private";
                let reason = ErrorReason::INSUFFICIENT_SCOPE;
                return Err(refusal(Code::PermissionDenied, reason, message));
            }
            "bad" => {
                let message = "invalid grammar: at 1";
                return Err(refusal(
                    Code::InvalidRequest,
                    ErrorReason::INVALID_GRAMMAR,
                    message,
                ));
            }
            other => {
                let message = format!("tag {other} not found");
                return Err(refusal(
                    Code::NotFound,
                    ErrorReason::UNKNOWN_CONTROLLER,
                    message,
                ));
            }
        }
        Ok(Box::new(Player {
            moves: moves(call.arg),
            index: 0,
            report: StepReport::default(),
        }))
    }
}

/// Steering by a [`MoveSource`], and the source.
pub fn steering() -> (Steering, Arc<MoveSource>) {
    let source = Arc::new(MoveSource::default());
    (
        Steering::new(Arc::clone(&source) as Arc<dyn SteerSource>),
        source,
    )
}

/// Controllers in memory. A module is anything that begins with `\0asm`; its id is its length, in 64 digits.
#[derive(Debug, Default)]
pub struct MemoryStore {
    modules: Mutex<BTreeMap<String, String>>,
    tags: Mutex<BTreeMap<String, TagInfo>>,
    /// Each upload takes one.
    gate: Option<Mutex<Receiver<()>>>,
}

impl ControllerStore for MemoryStore {
    fn upload(&self, user: SteerUser<'_>, module: Bytes) -> Result<UploadedModule, SteerRefusal> {
        if !module.starts_with(b"\0asm") {
            let message = "invalid module: bad magic";
            return Err(refusal(
                Code::InvalidRequest,
                ErrorReason::INVALID_MODULE,
                message,
            ));
        }
        if let Some(gate) = &self.gate {
            // An error says that it is open.
            let _ = gate.lock().unwrap().recv();
        }
        let module_id = format!("{:064x}", module.len());
        let mut modules = self.modules.lock().unwrap();
        modules.insert(module_id.clone(), user.name.to_owned());
        Ok(UploadedModule {
            module_id,
            wasm_size: module.len() as u64,
            compiled_size: 7,
            time_ms: 3,
        })
    }

    fn set_tags(
        &self,
        user: SteerUser<'_>,
        module_id: &str,
        tags: &[String],
    ) -> Result<Vec<TagInfo>, SteerRefusal> {
        self.known(module_id)?;
        let mut all = self.tags.lock().unwrap();
        let set = tags.iter().map(|tag| {
            if !user.is_admin && !tag.starts_with(&format!("{}.", user.name)) {
                let message = "permission denied for tag name";
                let reason = ErrorReason::INSUFFICIENT_SCOPE;
                return Err(refusal(Code::PermissionDenied, reason, message));
            }
            let info = TagInfo {
                tag: tag.clone(),
                module_id: module_id.to_owned(),
                updated_at: 1_790_000_000,
                updated_by: user.name.to_owned(),
                wasm_size: 8,
                compiled_size: 7,
                public: user.is_admin,
            };
            Ok(info)
        });
        let set: Vec<_> = set.collect::<Result<_, _>>()?;
        all.extend(set.iter().map(|info| (info.tag.clone(), info.clone())));
        Ok(set)
    }

    fn tags(&self, page: TagPage<'_>) -> Result<Vec<TagInfo>, SteerRefusal> {
        let all = self.tags.lock().unwrap();
        let tags = all.values();
        let tags = tags.filter(|info| info.tag.starts_with(page.prefix));
        let tags = tags.filter(|info| page.after.is_none_or(|after| &*info.tag > after));
        let limit = if page.limit == 0 {
            usize::MAX
        } else {
            page.limit
        };
        Ok(tags.take(limit).cloned().collect())
    }

    fn modules(
        &self,
        user: SteerUser<'_>,
        page: ModulePage<'_>,
    ) -> Result<Vec<ModuleInfo>, SteerRefusal> {
        let modules = self.modules.lock().unwrap().clone();
        let modules = modules.iter();
        let own = modules.filter(|(_, owner)| user.is_admin || **owner == user.name);
        let own = own.filter(|(id, _)| page.after.is_none_or(|after| &***id > after));
        let limit = if page.limit == 0 {
            usize::MAX
        } else {
            page.limit
        };
        own.take(limit)
            .map(|(id, _)| self.module(user, id))
            .collect()
    }

    fn module(&self, _user: SteerUser<'_>, module_id: &str) -> Result<ModuleInfo, SteerRefusal> {
        let owner = self.known(module_id)?;
        let tags = self.tags.lock().unwrap();
        let tags = tags.values().filter(|info| info.module_id == module_id);
        Ok(ModuleInfo {
            module_id: module_id.to_owned(),
            dialect: "p1",
            imports: vec!["env.aici_host_stop".into()],
            wasm_size: 8,
            compiled_size: 7,
            owner,
            created: 1_790_000_000,
            tags: tags.map(|info| info.tag.clone()).collect(),
        })
    }

    fn delete_tags(&self, _user: SteerUser<'_>, tags: &[String]) -> Result<(), SteerRefusal> {
        let mut all = self.tags.lock().unwrap();
        for tag in tags {
            all.remove(tag).ok_or_else(|| {
                let message = format!("tag {tag} not found");
                refusal(Code::NotFound, ErrorReason::UNKNOWN_CONTROLLER, message)
            })?;
        }
        Ok(())
    }

    fn delete_module(&self, _user: SteerUser<'_>, module_id: &str) -> Result<(), SteerRefusal> {
        self.known(module_id)?;
        self.modules.lock().unwrap().remove(module_id);
        Ok(())
    }
}

impl MemoryStore {
    /// A store in which an upload takes until something is sent, and none takes long once the sender is dropped.
    pub fn gated() -> (Self, SyncSender<()>) {
        let (open, gate) = sync_channel(1);
        let store = Self {
            gate: Some(Mutex::new(gate)),
            ..Self::default()
        };
        (store, open)
    }

    /// The owner of a module.
    fn known(&self, module_id: &str) -> Result<String, SteerRefusal> {
        let owner = self.modules.lock().unwrap().get(module_id).cloned();
        let unknown = || {
            refusal(
                Code::NotFound,
                ErrorReason::UNKNOWN_CONTROLLER,
                "module not found",
            )
        };
        owner.ok_or_else(unknown)
    }
}
