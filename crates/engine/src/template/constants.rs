//! What minijinja computes when it compiles a template, before there is a budget: `'a' * 1000 * 1000` becomes the text.
//!
//! Of all operators on constants only `*` makes more than it is given, so what each of them would make is added up. And it computes
//! them anew at each level above them, in vain if something there is no constant: that work is added up too.

use minijinja::machinery::ast::{BinOp, BinOpKind, Call, CallArg, Expr, Macro, Map, Stmt};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::bounds;

/// The maximum of bytes of all constants of a template that are multiplied.
const CONSTANT_BYTES_MAX: usize = 1 << 20;
/// The maximum of bytes that computing all constants may make or compare, at all levels together.
const WORK_BYTES_MAX: usize = bounds::MADE_BYTES_MAX;

/// Checks a template before it is compiled.
///
/// # Errors
/// It has constants that would be huge.
pub(super) fn check(template: &Stmt<'_>) -> Result<(), Error> {
    Constants::default().statement(template)
}

#[derive(Default)]
struct Constants {
    /// Of products.
    bytes: usize,
    work: usize,
}

/// What it takes to compute an expression that may be a constant, and the size of the result; upper bounds.
#[derive(Clone, Copy, Default)]
struct Computed {
    work: usize,
    bytes: usize,
}

impl Computed {
    /// Of an expression that minijinja never computes.
    const NEVER: Self = Self { work: 0, bytes: 0 };

    /// Another part of the same value.
    fn with(self, part: Self) -> Self {
        Self {
            work: self.work.saturating_add(part.work),
            bytes: self.bytes.saturating_add(part.bytes),
        }
    }

    /// With this much more work.
    fn after(self, work: usize) -> Self {
        Self {
            work: self.work.saturating_add(work),
            ..self
        }
    }
}

impl Constants {
    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
            Stmt::Template(it) => self.statements(&it.children),
            Stmt::EmitExpr(it) => self.expression(&it.expr).map(drop),
            Stmt::ForLoop(it) => {
                self.expressions([&it.target, &it.iter].into_iter().chain(&it.filter_expr))?;
                self.statements(&it.body)?;
                self.statements(&it.else_body)
            }
            Stmt::IfCond(it) => {
                self.expression(&it.expr)?;
                self.statements(&it.true_body)?;
                self.statements(&it.false_body)
            }
            Stmt::WithBlock(it) => {
                for (target, value) in &it.assignments {
                    self.expressions([target, value])?;
                }
                self.statements(&it.body)
            }
            Stmt::Set(it) => self.expressions([&it.target, &it.expr]).map(drop),
            Stmt::SetBlock(it) => {
                self.expressions([&it.target].into_iter().chain(&it.filter))?;
                self.statements(&it.body)
            }
            Stmt::AutoEscape(it) => {
                self.expression(&it.enabled)?;
                self.statements(&it.body)
            }
            Stmt::FilterBlock(it) => {
                self.expression(&it.filter)?;
                self.statements(&it.body)
            }
            Stmt::Block(it) => self.statements(&it.body),
            Stmt::Import(it) => self.expressions([&it.expr, &it.name]).map(drop),
            Stmt::FromImport(it) => self.expression(&it.expr).map(drop),
            Stmt::Extends(it) => self.expression(&it.name).map(drop),
            Stmt::Include(it) => self.expression(&it.name).map(drop),
            Stmt::Macro(it) => self.definition(it),
            Stmt::CallBlock(it) => {
                self.call(&it.call)?;
                self.definition(&it.macro_decl)
            }
            Stmt::Do(it) => self.call(&it.call),
        }
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) -> Result<(), Error> {
        statements.iter().try_for_each(|it| self.statement(it))
    }

    fn definition(&mut self, definition: &Macro<'_>) -> Result<(), Error> {
        self.expressions(definition.args.iter().chain(&definition.defaults))?;
        self.statements(&definition.body)
    }

    fn expressions<'a, 's: 'a>(
        &mut self,
        expressions: impl IntoIterator<Item = &'a Expr<'s>>,
    ) -> Result<Computed, Error> {
        let mut all = Computed::default();
        for part in expressions {
            all = all.with(self.expression(part)?);
        }
        Ok(all)
    }

    /// From the inside, so that the constants that are computed here have been checked.
    fn expression(&mut self, expression: &Expr<'_>) -> Result<Computed, Error> {
        let computed = match expression {
            Expr::Const(it) => Computed {
                work: 1,
                bytes: it.value.as_str().map_or(bounds::ELEMENT_BYTES, str::len),
            },
            Expr::UnaryOp(it) => self.expression(&it.expr)?,
            Expr::BinOp(it) => self.operator(it)?,
            Expr::Compare(it) => {
                let first = self.expression(&it.expr)?;
                let all = first.with(self.expressions(it.ops.iter().map(|op| &op.expr))?);
                all.after(all.bytes)
            }
            Expr::List(it) => self.elements(&it.items)?,
            Expr::Tuple(it) => self.elements(&it.items)?,
            Expr::Map(it) => self.dictionary(it)?,
            other => self.never(other)?,
        };
        self.work = self.work.saturating_add(computed.work);
        if self.work > WORK_BYTES_MAX {
            let message = "its constants take too long to compute";
            return Err(Error::new(ErrorKind::SyntaxError, message));
        }
        Ok(computed)
    }

    /// Checks the parts of an expression that is no constant, whatever it consists of.
    fn never(&mut self, expression: &Expr<'_>) -> Result<Computed, Error> {
        match expression {
            Expr::Slice(it) => {
                let bounds = [&it.start, &it.stop, &it.step].into_iter().flatten();
                self.expressions([&it.expr].into_iter().chain(bounds))?;
            }
            Expr::IfExpr(it) => {
                self.expressions([&it.test_expr, &it.true_expr])?;
                self.expressions(&it.false_expr)?;
            }
            Expr::Filter(it) => {
                self.expressions(&it.expr)?;
                self.arguments(&it.args)?;
            }
            Expr::Test(it) => {
                self.expression(&it.expr)?;
                self.arguments(&it.args)?;
            }
            Expr::GetAttr(it) => self.expression(&it.expr).map(drop)?,
            Expr::GetItem(it) => self.expressions([&it.expr, &it.subscript_expr]).map(drop)?,
            Expr::Call(it) => self.call(it)?,
            Expr::Var(_)
            | Expr::Const(_)
            | Expr::UnaryOp(_)
            | Expr::BinOp(_)
            | Expr::Compare(_)
            | Expr::List(_)
            | Expr::Tuple(_)
            | Expr::Map(_) => {}
        }
        Ok(Computed::NEVER)
    }

    fn operator(&mut self, operator: &BinOp<'_>) -> Result<Computed, Error> {
        let both = self.expressions([&operator.left, &operator.right])?;
        let made = match operator.op {
            BinOpKind::Mul => Computed {
                bytes: both
                    .bytes
                    .saturating_add(self.product(&operator.left, &operator.right)?),
                ..both
            },
            _ => both,
        };
        Ok(made.after(made.bytes))
    }

    fn elements(&mut self, elements: &[Expr<'_>]) -> Result<Computed, Error> {
        let all = self.expressions(elements)?;
        let own = elements.len().saturating_mul(bounds::ELEMENT_BYTES);
        Ok(all.with(Computed {
            work: own,
            bytes: own,
        }))
    }

    fn dictionary(&mut self, dictionary: &Map<'_>) -> Result<Computed, Error> {
        let all = self.expressions(dictionary.keys.iter().chain(&dictionary.values))?;
        let own = dictionary.keys.len().saturating_mul(bounds::MEMBER_BYTES);
        let keys = dictionary.keys.iter().filter_map(|key| match key {
            Expr::Const(key) => Some(&key.value),
            _ => None,
        });
        let compared = bounds::alike(keys);
        Ok(all.with(Computed {
            work: own.saturating_add(compared),
            bytes: own,
        }))
    }

    fn call(&mut self, call: &Call<'_>) -> Result<(), Error> {
        self.expression(&call.expr)?;
        self.arguments(&call.args)
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) -> Result<(), Error> {
        arguments.iter().try_for_each(|argument| match argument {
            CallArg::Pos(it)
            | CallArg::Kwarg(_, it)
            | CallArg::PosSplat(it)
            | CallArg::KwargSplat(it) => self.expression(it).map(drop),
        })
    }

    /// The bytes of a product of constants.
    fn product(&mut self, left: &Expr<'_>, right: &Expr<'_>) -> Result<usize, Error> {
        let (Some(left), Some(right)) = (left.as_const(), right.as_const()) else {
            return Ok(0);
        };
        let is_number = |value: &Value| {
            matches!(
                value.kind(),
                ValueKind::Number | ValueKind::Bool | ValueKind::None
            )
        };
        let (repeated, times) = match (is_number(&left), is_number(&right)) {
            // A number, or nothing at all.
            (true, true) | (false, false) => return Ok(0),
            (false, true) => (left, right),
            (true, false) => (right, left),
        };
        let bytes = bounds::size(&repeated, CONSTANT_BYTES_MAX)
            .map_err(|_| too_large())?
            .saturating_mul(times.as_usize().unwrap_or(0));
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > CONSTANT_BYTES_MAX {
            return Err(too_large());
        }
        Ok(bytes)
    }
}

fn too_large() -> Error {
    let message = "it multiplies by constants that are too large";
    Error::new(ErrorKind::SyntaxError, message)
}
